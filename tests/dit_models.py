"""A small transformer with every kind of layer, and sequences for it, shared by the tests of the transformer."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.magi2_core.config import MoeConfig, PreviewConfig
from magi2_native.magi2_core.dit.inputs import Modality, PackedLayout, PackedTokens
from magi2_native.magi2_core.dit.model import Layer, PreviewTransformer
from magi2_native.magi2_core.dit.parameters import preview_tensors
from magi2_native.magi2_core.dit.prepare import Prepared, prepare
from magi2_native.magi2_core.dit.rope import rotary_bands
from magi2_native.magi2_core.dit.weights import Tensors
from torch import Tensor, nn

CONFIG = PreviewConfig(
    num_layers=4,
    hidden_size=48,
    head_dim=8,
    num_query_groups=3,
    video_in_channels=5,
    audio_in_channels=7,
    text_in_channels=9,
    intermediate_factor=4,
    mm_layers=(0, 3),
    moe=MoeConfig(
        num_heads=3,
        num_experts=8,
        top_k=3,
        moe_layers=(1, 3),
        expert_intermediate_size=12,
        shared_expert_intermediate_size=16,
        modality_specific_expert_intermediate_size=8,
    ),
)
LAYERS = {"mm": 0, "moe": 1, "plain": 2, "mm_moe": 3}

# Two branches, as packing makes them, and the same rows in an order that mixes modalities inside each branch.
PACKED = ((0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2), (0, 0, 0, 0, 0, 0, 1, 1, 1, 2))
MIXED = ((2, 0, 1, 0, 0, 1, 2, 0, 0, 1, 0), (0, 1, 0, 0, 2, 0, 1, 0, 1, 0))


def small_layout(segments: tuple[tuple[int, ...], ...] = PACKED) -> PackedLayout:
    """A sequence with these modalities in each segment; every row has a position of its own."""
    modality = torch.tensor([m for segment in segments for m in segment], dtype=torch.int32)
    generator = torch.Generator().manual_seed(3)
    position = torch.rand(len(modality), 3, generator=generator) * 4
    coords = torch.cat([position, torch.full((len(modality), 6), 5.0)], 1)
    lengths = torch.tensor([0, *(len(segment) for segment in segments)])
    return PackedLayout(coords, modality, tuple(lengths.cumsum(0).tolist()))


def small_tokens(layout: PackedLayout, seed: int = 4, time: bool = True) -> PackedTokens:
    """Random features for a layout; `time` adds an embedding of 6 channels."""
    generator = torch.Generator().manual_seed(seed)
    counts = [int((layout.modality_T.clamp(max=Modality.TEXT) == m).sum()) for m in range(3)]
    widths = (CONFIG.video_in_channels, CONFIG.audio_in_channels, CONFIG.text_in_channels)
    features = [torch.randn(n, c, generator=generator) for n, c in zip(counts, widths, strict=True)]
    return PackedTokens(*features, torch.randn(layout.tokens, 6, generator=generator) if time else None)


def small_prepared(piece_rows: int = 256, layout: PackedLayout | None = None) -> Prepared:
    prepared = prepare(CONFIG, layout or small_layout(), ParallelContext.single(), rotary_bands(8), "cpu")
    return replace(prepared, piece_rows=piece_rows)


def small_model(dtype: torch.dtype = torch.float32, config: PreviewConfig = CONFIG) -> PreviewTransformer:
    """A filled transformer; the same weights on every call, up to their dtype."""
    model = PreviewTransformer(config, compute_dtype=dtype)
    fill(model)
    return model


def small_layer(kind: str, dtype: torch.dtype) -> Layer:
    """One filled layer of a kind of LAYERS."""
    config, index = replace(CONFIG, params_dtype=dtype), LAYERS[kind]
    share = ParallelContext.single().share(config.moe.num_heads, config.moe.num_experts)
    layer = Layer(config, index, Tensors(preview_tensors(config), share, f"block.layers.{index}."))
    fill(layer, f"block.layers.{index}.")
    return layer


def fill(module: nn.Module, prefix: str = "") -> None:
    """Random weights, the same for a name on every call and in every dtype, that keep activations near 1."""
    for name, parameter in module.named_parameters():
        parameter.data.copy_(_value(prefix + name, parameter))


def _value(name: str, parameter: Tensor) -> Tensor:
    if name.endswith("bands"):
        return rotary_bands(8 * len(parameter))
    value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
    if name.endswith("norm.weight"):
        value *= 0.2
    elif parameter.ndim > 1 and "bias" not in name and "sinks" not in name:
        value *= parameter.shape[0 if "phi" in name else 1] ** -0.5
    return value.bfloat16()
