"""The tensors of the preview transformer: names, shapes on disk, dtypes and division over ranks (10 §11, §12.1)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..checkpoint.spec import Shard, TensorSpec
from ..config import PreviewConfig, TransformerConfig
from .runs import MODALITIES

FP32 = torch.float32


def preview_tensors(config: PreviewConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, in the order of the forward.

    What the reference computes in bf16 has `config.params_dtype`, which is the compute dtype; what it computes in fp32
    (norms, stream mixing, router, adapters) is fp32 in every mode (10 §1, §12.1).
    """
    table = dict(adapter_tensors(config))
    for layer in range(config.num_layers):
        prefix = f"block.layers.{layer}."
        table |= {prefix + name: spec for name, spec in _layer(config, layer)}
    return table


def adapter_tensors(config: TransformerConfig) -> Iterator[tuple[str, TensorSpec]]:
    """The embedders, the rotary bands and the final layers (10 §12.1, 50 §4)."""
    width = config.stream_width
    for name, channels in (
        ("video", config.video_in_channels),
        ("text", config.text_in_channels),
        ("audio", config.audio_in_channels),
    ):
        yield f"pre_adapter.{name}_embedder.weight", TensorSpec((width, channels), FP32)
        yield f"pre_adapter.{name}_embedder.bias", TensorSpec((width,), FP32)
    yield "pre_adapter.rope.bands", TensorSpec((config.head_dim // 8,), FP32)
    for name, channels in (("video", config.video_in_channels), ("audio", config.audio_in_channels)):
        yield f"post_adapter.final_norm_{name}.weight", TensorSpec((width,), FP32)
        yield f"post_adapter.final_linear_{name}.weight", TensorSpec((channels, width), FP32)


def _layer(config: PreviewConfig, layer: int) -> Iterator[tuple[str, TensorSpec]]:
    n, width, m = config.num_stream, config.stream_width, config.modalities(layer)
    for branch in ("attn", "mlp"):
        for kind, shape in (("pre", (n,)), ("post", (n,)), ("res", (n, n))):
            yield f"mhc_alpha_{kind}_{branch}", TensorSpec((1,), FP32)
            yield f"mhc_bias_{kind}_{branch}", TensorSpec(shape, FP32)
        yield f"mhc_phi_fused_{branch}", TensorSpec((width, 2 * n + n * n), FP32)
    yield "mhc_norm.weight", TensorSpec((m * width,), FP32, blocks=m)
    yield from ((f"attention.{name}", spec) for name, spec in _attention(config, m))
    is_moe = layer in config.moe.moe_layers
    yield from ((f"mlp.{name}", spec) for name, spec in (_moe(config) if is_moe else _dense(config, m)))


def _attention(config: PreviewConfig, m: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, d, dtype = config.hidden_size, config.head_dim, config.params_dtype
    q, kv = config.heads * d, config.kv_heads * d
    yield "sinks", TensorSpec((max(1, config.sink_token_num), config.heads), FP32, Shard.HEAD_COLUMNS)
    yield "pre_norm.weight", TensorSpec((m * hidden,), FP32, blocks=m)
    yield "q_norm.weight", TensorSpec((m * d,), FP32, blocks=m)
    yield "k_norm.weight", TensorSpec((m * d,), FP32, blocks=m)
    yield "linear_g.weight", TensorSpec((m * config.heads, hidden), dtype, Shard.COLUMN, m)
    yield "linear_qkv.weight", TensorSpec((m * (q + 2 * kv), hidden), dtype, Shard.COLUMN, m, (q, kv, kv))
    yield "linear_proj.weight", TensorSpec((m * hidden, q), dtype, Shard.ROW, m)


def _dense(config: PreviewConfig, m: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, inner, dtype = config.hidden_size, config.dense_width, config.params_dtype
    yield "pre_norm.weight", TensorSpec((m * hidden,), FP32, blocks=m)
    yield "up_gate_proj.weight", TensorSpec((m * 2 * inner, hidden), dtype, Shard.COLUMN, m)
    yield "down_proj.weight", TensorSpec((m * hidden, inner), dtype, Shard.ROW, m)


def _moe(config: PreviewConfig) -> Iterator[tuple[str, TensorSpec]]:
    """The norm and the modality experts have three blocks in every MoE layer (10 §9)."""
    hidden, width, d, dtype = config.hidden_size, config.moe_width, config.moe_head_dim, config.params_dtype
    moe, banks = config.moe, config.moe.num_heads * config.moe.num_experts
    yield "pre_norm.weight", TensorSpec((MODALITIES * hidden,), FP32, blocks=MODALITIES)
    yield "split_linear.weight", TensorSpec((width, hidden), dtype, Shard.COLUMN)
    yield "merge_linear.weight", TensorSpec((hidden, width), dtype, Shard.ROW)
    for name, inner, m in (
        ("shared_expert", moe.shared_expert_intermediate_size, 1),
        ("modality_specific_shared_expert", moe.modality_specific_expert_intermediate_size, MODALITIES),
    ):
        yield f"{name}_fc1.weight", TensorSpec((m * 2 * inner, hidden), dtype, Shard.COLUMN, m)
        yield f"{name}_fc2.weight", TensorSpec((m * hidden, inner), dtype, Shard.ROW, m)
    inner = moe.expert_intermediate_size
    yield "moe_mlp.gate", TensorSpec((banks, d), FP32, Shard.HEADS)
    # Input-major, unlike a linear layer: rows times W (10 §9).
    yield "moe_mlp.W_gate", TensorSpec((banks, d, inner), dtype, Shard.BANKS)
    yield "moe_mlp.W_up", TensorSpec((banks, d, inner), dtype, Shard.BANKS)
    yield "moe_mlp.W_down", TensorSpec((banks, inner, d), dtype, Shard.BANKS)
    yield "moe_mlp.router.expert_bias", TensorSpec((banks,), FP32, Shard.HEADS)
    yield "moe_mlp.router.expert_bias_ema", TensorSpec((banks,), FP32, Shard.HEADS)
