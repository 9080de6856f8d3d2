"""What the text encoder's folder holds: the Qwen3.5 text model's sizes and the tensors that are read (30 §2, 4.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..checkpoint.spec import TensorSpec
from ..errors import CheckpointError

# The output is the residual stream two layers below the top: the last two layers never run (30 §4.1).
SKIPPED_LAYERS = 2
PREFIX = "model.language_model."


@dataclass(frozen=True)
class TextEncoderConfig:
    """Sizes of the Qwen3.5 text model; the defaults are Qwen3.5-27B, the released encoder (30 §4.3)."""

    num_hidden_layers: int = 64
    hidden_size: int = 5120
    intermediate_size: int = 17408
    vocab_size: int = 248320
    num_attention_heads: int = 24
    num_key_value_heads: int = 4
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 48
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> TextEncoderConfig:
        """Read the content of `text_encoder/config.json`; CheckpointError if it describes another kind of model."""
        text = text_section(config)
        known = {f.name: text[f.name] for f in fields(cls) if text.get(f.name) is not None}
        known["layer_types"] = tuple(known.get("layer_types", ()))
        missing = [f.name for f in fields(cls) if f.name not in known and f.name != "full_attention_interval"]
        if missing:
            raise CheckpointError(f"The text encoder's config.json has no {missing[0]!r} in its text_config.")
        result = cls(**known)
        types = result.types
        if len(types) != result.num_hidden_layers:
            raise CheckpointError(
                f"The text encoder's config.json lists {len(types)} layer_types for {result.num_hidden_layers} layers."
            )
        if unknown := set(types) - {"linear_attention", "full_attention"}:
            raise CheckpointError(f"The text encoder's config.json has the unknown layer type {unknown.pop()!r}.")
        if result.num_hidden_layers <= SKIPPED_LAYERS:
            raise CheckpointError(
                f"The text encoder has {result.num_hidden_layers} layers; it needs more than {SKIPPED_LAYERS},"
                f" because its output is taken {SKIPPED_LAYERS} layers below the top."
            )
        return result

    @property
    def types(self) -> tuple[str, ...]:
        """Kind of every layer: each fourth one is full attention, the others are linear (30 §4.3)."""
        if self.layer_types:
            return self.layer_types
        every = self.full_attention_interval
        kinds = (
            "full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(self.num_hidden_layers)
        )
        return tuple(kinds)


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the text model's part of a Qwen3.5 config, nested or flat; CheckpointError for another model type."""
    text = config.get("text_config", config)
    kind = config.get("model_type")
    if kind not in ("qwen3_5", "qwen3_5_text") or not isinstance(text, Mapping):
        raise CheckpointError(
            f"The text encoder's config.json has model_type {kind!r}; this model's text encoder is 'qwen3_5'"
            " (Qwen3.5-27B)."
        )
    return text


def text_encoder_tensors(config: TextEncoderConfig, skipped_layers: int = SKIPPED_LAYERS) -> dict[str, TensorSpec]:
    """Table of every tensor that encoding reads, by its name in the checkpoint: embeddings and the layers that run.

    The vision tower, the heads, the final norm and the topmost `skipped_layers` layers are never read (30 §4.2).
    """
    hidden = config.hidden_size
    tensors = {f"{PREFIX}embed_tokens.weight": _bf16(config.vocab_size, hidden)}
    for i, kind in enumerate(config.types[: config.num_hidden_layers - skipped_layers]):
        mixer = _full_attention(config) if kind == "full_attention" else _linear_attention(config)
        layer = {
            "input_layernorm.weight": _bf16(hidden),
            **mixer,
            "post_attention_layernorm.weight": _bf16(hidden),
            "mlp.gate_proj.weight": _bf16(config.intermediate_size, hidden),
            "mlp.up_proj.weight": _bf16(config.intermediate_size, hidden),
            "mlp.down_proj.weight": _bf16(hidden, config.intermediate_size),
        }
        tensors.update({f"{PREFIX}layers.{i}.{name}": spec for name, spec in layer.items()})
    return tensors


def _full_attention(config: TextEncoderConfig) -> dict[str, TensorSpec]:
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "self_attn.q_proj.weight": _bf16(2 * q, hidden),  # for each head its query, then its output gate
        "self_attn.k_proj.weight": _bf16(kv, hidden),
        "self_attn.v_proj.weight": _bf16(kv, hidden),
        "self_attn.o_proj.weight": _bf16(hidden, q),
        "self_attn.q_norm.weight": _bf16(head),
        "self_attn.k_norm.weight": _bf16(head),
    }


def _linear_attention(config: TextEncoderConfig) -> dict[str, TensorSpec]:
    hidden, heads = config.hidden_size, config.linear_num_value_heads
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = heads * config.linear_value_head_dim
    return {
        "linear_attn.in_proj_qkv.weight": _bf16(2 * key + value, hidden),
        "linear_attn.in_proj_z.weight": _bf16(value, hidden),
        "linear_attn.in_proj_a.weight": _bf16(heads, hidden),
        "linear_attn.in_proj_b.weight": _bf16(heads, hidden),
        "linear_attn.conv1d.weight": _bf16(2 * key + value, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": _bf16(heads),
        "linear_attn.dt_bias": _bf16(heads),
        "linear_attn.norm.weight": _bf16(config.linear_value_head_dim),
        "linear_attn.out_proj.weight": _bf16(hidden, value),
    }


def _bf16(*shape: int) -> TensorSpec:
    # Also A_log and the norm, which the files keep in float32: the features were made from bf16 weights (30 §4.3).
    return TensorSpec(shape, torch.bfloat16)
