"""The tensors of the refiner: names, shapes on disk and dtypes. Every rank holds all of them (50 §4)."""

from __future__ import annotations

from collections.abc import Iterator

from ..checkpoint.spec import TensorSpec
from ..config import RefinerConfig
from ..dit.parameters import FP32, adapter_tensors


def refiner_tensors(config: RefinerConfig) -> dict[str, TensorSpec]:
    """Every tensor of the checkpoint, in the order of the forward; linear weights have `config.params_dtype`."""
    table = dict(adapter_tensors(config))
    for layer in range(config.num_layers):
        prefix = f"block.layers.{layer}."
        table |= {prefix + name: spec for name, spec in _layer(config, config.modalities(layer))}
    return table


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
