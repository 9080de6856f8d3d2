"""A small transformer with the released head counts, and the requests that the tests of parallel layouts give it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.magi2_core.checkpoint.shard import local_slices
from magi2_native.magi2_core.config import MoeConfig, PreviewConfig
from magi2_native.magi2_core.dit.inputs import PackedLayout, PackedTokens
from magi2_native.magi2_core.dit.model import PreviewTransformer
from magi2_native.magi2_core.dit.parameters import preview_tensors
from magi2_native.magi2_core.sampling.packing import Conditions, pack_request, pack_tokens
from torch import Tensor

# 24 attention heads and 12 MoE heads, so that every layout of the released model divides this one in the same way.
# All four kinds of layer: dense and MoE, each with one weight block and with one for every modality.
CONFIG = PreviewConfig(
    num_layers=4,
    hidden_size=192,
    head_dim=8,
    num_query_groups=24,
    text_in_channels=32,
    mm_layers=(0, 2),
    intermediate_factor=1.01,
    num_stream=2,
    moe=MoeConfig(
        num_heads=12,
        num_experts=6,
        top_k=2,
        moe_layers=(1, 2),
        expert_intermediate_size=24,
        shared_expert_intermediate_size=32,
        modality_specific_expert_intermediate_size=16,
    ),
)
MOE_LAYERS, DENSE_LAYERS = 2, 2


def weights(config: PreviewConfig) -> dict[str, Tensor]:
    """The same random checkpoint on every call; sized so that activations stay near 1 and every branch matters."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, spec in preview_tensors(config).items():
        tensor = torch.randn(spec.shape, generator=generator)
        if len(spec.shape) > 1 and "bias" not in name and "sinks" not in name:
            fan_in = spec.shape[1] if "moe_mlp.W_" in name or "phi" not in name else spec.shape[0]
            tensor *= fan_in**-0.5
        elif name.endswith("norm.weight"):
            tensor *= 0.1
        tensors[name] = tensor.to(spec.dtype)
    tensors["pre_adapter.rope.bands"] = torch.pi * 2.0 ** -torch.arange(config.head_dim // 8)
    return tensors


def build(parallel: ParallelContext, dtype: torch.dtype = torch.float32) -> PreviewTransformer:
    """The transformer of one rank in a compute dtype, with its own slices of `weights`."""
    config = replace(CONFIG, params_dtype=dtype)
    share = parallel.share(config.moe.num_heads, config.moe.num_experts)
    table, whole = preview_tensors(config), weights(config)
    with torch.device("meta"):
        model = PreviewTransformer(config, parallel, compute_dtype=dtype)
    local = {key: torch.cat([whole[key][part] for part in local_slices(table[key], share)]) for key in table}
    model.load_state_dict(local, strict=True, assign=True)
    return model


@dataclass(frozen=True)
class Shot:
    """Sizes of one request: text rows of the conditional branch and, unless None, of the unconditional one."""

    text: int
    other_text: int | None
    grid: tuple[int, int, int]
    audio: int
    pictures: int = 0


SHOTS = {
    "text_to_clip": Shot(text=11, other_text=3, grid=(3, 2, 3), audio=6),
    "picture_to_clip": Shot(text=9, other_text=4, grid=(2, 3, 2), audio=5, pictures=2),
    "fewer_tokens_than_ranks": Shot(text=1, other_text=0, grid=(1, 1, 1), audio=0),
    "one_token": Shot(text=0, other_text=None, grid=(1, 1, 1), audio=0),
    "no_sound_and_no_text": Shot(text=0, other_text=None, grid=(2, 2, 3), audio=0),
}


def packed(shot: Shot, branches: slice = slice(None)) -> tuple[PackedLayout, PackedTokens]:
    """The packed sequence of a request's branches, with the same latents and conditions on every call."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    video, audio = random(1, 48, *shot.grid), random(1, shot.audio, 64)
    images = random(shot.pictures, 48, 2, 1) if shot.pictures else None
    markers = random(shot.pictures, CONFIG.text_in_channels) if shot.pictures else None
    texts = [length for length in (shot.text, shot.other_text) if length is not None]
    conditions = [Conditions(random(length, CONFIG.text_in_channels), images, markers) for length in texts]
    request = pack_request(shot.grid, shot.audio, conditions[branches])
    return request.layout, pack_tokens(request, video, audio, 0.7)
