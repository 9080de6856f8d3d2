"""The tensors of the refiner: names, shapes on disk and dtypes. Every rank holds all of them (50 §4)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..checkpoint.spec import TensorSpec
from ..config import RefinerConfig

FP32 = torch.float32


def refiner_tensors(config: RefinerConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, in the order of the forward; linear weights have `config.params_dtype`."""
    table = dict(_adapters(config))
    for layer in range(config.num_layers):
        prefix = f"block.layers.{layer}."
        table |= {prefix + name: spec for name, spec in _layer(config, config.modalities(layer))}
    return table


def _adapters(config: RefinerConfig) -> Iterator[tuple[str, TensorSpec]]:
    hidden = config.hidden_size
    for name, channels in (
        ("video", config.video_in_channels),
        ("audio", config.audio_in_channels),
        ("text", config.text_in_channels),
    ):
        yield f"pre_adapter.{name}_embedder.weight", TensorSpec((hidden, channels), FP32)
        yield f"pre_adapter.{name}_embedder.bias", TensorSpec((hidden,), FP32)
    yield "pre_adapter.rope.bands", TensorSpec((config.head_dim // 8,), FP32)
    for name, channels in (("video", config.video_in_channels), ("audio", config.audio_in_channels)):
        yield f"post_adapter.final_norm_{name}.weight", TensorSpec((hidden,), FP32)
        yield f"post_adapter.final_linear_{name}.weight", TensorSpec((channels, hidden), FP32)


def _layer(config: RefinerConfig, m: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, d, inner, dtype = config.hidden_size, config.head_dim, config.mlp_width, config.params_dtype
    q, kv = config.heads * d, config.kv_heads * d
    yield "attention.pre_norm.weight", TensorSpec((m * hidden,), FP32, blocks=m)
    yield "attention.linear_qkv.weight", TensorSpec((m * (q + 2 * kv), hidden), dtype, blocks=m, parts=(q, kv, kv))
    yield "attention.linear_g.weight", TensorSpec((m * config.heads, hidden), dtype, blocks=m)
    yield "attention.linear_proj.weight", TensorSpec((m * hidden, q), dtype, blocks=m)
    yield "attention.q_norm.weight", TensorSpec((m * d,), FP32, blocks=m)
    yield "attention.k_norm.weight", TensorSpec((m * d,), FP32, blocks=m)
    yield "mlp.pre_norm.weight", TensorSpec((m * hidden,), FP32, blocks=m)
    yield "mlp.up_gate_proj.weight", TensorSpec((m * 2 * inner, hidden), dtype, blocks=m)
    yield "mlp.down_proj.weight", TensorSpec((m * hidden, inner), dtype, blocks=m)
