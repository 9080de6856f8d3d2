"""Typed configurations of the two transformers, read from the released JSON and checked (10 §1, 50 §2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from .errors import CheckpointError

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_dtype(name: str) -> torch.dtype:
    """Turn 'bfloat16' or 'torch.bfloat16' into the torch dtype; CheckpointError for anything else (10 §1)."""
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"params_dtype is {name!r}; it must be one of {', '.join(_DTYPES)}.")
    return dtype


@dataclass(frozen=True)
class MoeConfig:
    """The multi-head mixture of experts: `num_heads` slices of the hidden state, each with its own experts."""

    num_heads: int = 12
    num_experts: int = 256
    top_k: int = 6
    route_norm: bool = True
    route_scale: float = 4.9
    moe_layers: tuple[int, ...] = tuple(range(2, 38))
    expert_intermediate_size: int = 1280
    shared_expert_intermediate_size: int = 1280
    modality_specific_expert_intermediate_size: int = 1280
    split_merge_intermediate_size: int | None = None


@dataclass(frozen=True)
class TransformerConfig:
    """What the architectures of the two transformers have in common."""

    num_layers: int
    hidden_size: int
    num_query_groups: int
    mm_layers: tuple[int, ...]
    head_dim: int = 128
    video_in_channels: int = 48
    audio_in_channels: int = 64
    text_in_channels: int = 5120
    params_dtype: torch.dtype = torch.bfloat16

    def check(self) -> None:
        """Raise CheckpointError if the sizes do not fit each other."""
        _divides(self.head_dim, self.hidden_size, "head_dim", "hidden_size")
        _divides(8, self.head_dim, "8", "head_dim")
        _divides(self.num_query_groups, self.heads, "num_query_groups", "the number of query heads")

    @property
    def heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups

    @property
    def stream_width(self) -> int:
        """Width carried between layers."""
        return self.hidden_size

    @property
    def out_channels(self) -> int:
        return max(self.video_in_channels, self.audio_in_channels)

    def modalities(self, layer: int) -> int:
        """Number of weight blocks of a layer's attention, stream norm and dense MLP: 3 in mm_layers, else 1."""
        return 3 if layer in self.mm_layers else 1


@dataclass(frozen=True)
class PreviewConfig(TransformerConfig):
    """Architecture of the preview transformer; the defaults are the released model (10 §1)."""

    num_layers: int = 40
    hidden_size: int = 3072
    num_query_groups: int = 24
    mm_layers: tuple[int, ...] = (0, 1, 38, 39)
    intermediate_factor: float = 4
    attn_softcap: float = -1.0
    sink_token_num: int = 1
    num_stream: int = 4
    moe: MoeConfig = MoeConfig()

    @classmethod
    def from_json(cls, arch: Mapping[str, Any]) -> PreviewConfig:
        """Read the `arch_config` object of the released JSON; fields it leaves out keep the released value.

        Accepts the nested form (attn_sinks.sink_token_num, mhc_config.num_stream) and the flat one. Fields without a
        meaning here are ignored. Raises CheckpointError for anything the model cannot be built with.
        """
        flat = dict(arch)
        for group, inner in (("attn_sinks", "sink_token_num"), ("mhc_config", "num_stream")):
            if inner in flat.get(group, {}):
                flat.setdefault(inner, flat[group][inner])
        for group in ("attn_gating", "attn_sinks", "mhc_config"):
            if flat.get(group, {}).get("enable", True) is not True:
                raise CheckpointError(f"{group}.enable is false; the preview transformer exists only with it on.")
        _require_swiglu7(flat)
        experts = flat.get("moe_config", {})
        if (score := experts.get("score_func", "sigmoid")) != "sigmoid":
            raise CheckpointError(f"moe_config.score_func is {score!r}; only 'sigmoid' exists.")
        config = replace(_pick(cls, flat), moe=_pick(MoeConfig, experts))
        config.check()
        return config

    def check(self) -> None:
        """Raise CheckpointError if the sizes do not fit each other."""
        super().check()
        _divides(self.moe.num_heads, self.moe_width, "moe_config.num_heads", "the width that it splits")
        for name, layers in (("mm_layers", self.mm_layers), ("moe_config.moe_layers", self.moe.moe_layers)):
            if wrong := [i for i in layers if not 0 <= i < self.num_layers]:
                last = self.num_layers - 1
                raise CheckpointError(f"{name} names layer {wrong[0]}, but the model has layers 0 to {last}.")
        if not 1 <= self.moe.top_k <= self.moe.num_experts:
            raise CheckpointError(f"moe_config.top_k is {self.moe.top_k}; it must be 1 to {self.moe.num_experts}.")

    @property
    def stream_width(self) -> int:
        """Width carried between layers: all residual streams side by side."""
        return self.num_stream * self.hidden_size

    @property
    def dense_width(self) -> int:
        """Width of the dense MLP (10 §8)."""
        return int(self.hidden_size * self.intermediate_factor * 2 / 3) // 128 * 128

    @property
    def moe_width(self) -> int:
        """Width between split_linear and merge_linear."""
        return self.moe.split_merge_intermediate_size or self.hidden_size

    @property
    def moe_head_dim(self) -> int:
        return self.moe_width // self.moe.num_heads


@dataclass(frozen=True)
class RefinerConfig(TransformerConfig):
    """Architecture of the second stage; the defaults are the released model (50 §2)."""

    num_layers: int = 30
    hidden_size: int = 4096
    num_query_groups: int = 8
    mm_layers: tuple[int, ...] = (0, 1, 28, 29)

    @classmethod
    def from_json(cls, arch: Mapping[str, Any]) -> RefinerConfig:
        """Read the refiner's `arch_config`; fields it leaves out keep the released value. Raises CheckpointError."""
        if arch.get("enable_attn_gating", True) is not True:
            raise CheckpointError("enable_attn_gating is false; the refiner exists only with it on.")
        _require_swiglu7(arch)
        config = _pick(cls, arch)
        config.check()
        return config

    @property
    def mlp_width(self) -> int:
        """Width of the MLP: rounded to 4, where the preview rounds to 128 (50 §3.3)."""
        return int(self.hidden_size * 4 * 2 / 3) // 4 * 4


def _pick(kind: type, source: Mapping[str, Any]) -> Any:
    """Build the dataclass `kind` from the keys of `source` that it knows."""
    values = {}
    for field in fields(kind):
        if field.name not in source or field.name == "moe":
            continue
        value = source[field.name]
        if field.name == "params_dtype" and isinstance(value, str):
            value = parse_dtype(value)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _require_swiglu7(arch: Mapping[str, Any]) -> None:
    names = {arch.get("activation_type", "swiglu7"), *arch.get("layer_activation_types", {}).values()}
    if names != {"swiglu7"}:
        raise CheckpointError(f"The activation is {sorted(names - {'swiglu7'})[0]!r}; only 'swiglu7' exists.")


def _divides(part: int, whole: int, part_name: str, whole_name: str) -> None:
    if part < 1 or whole < 1 or whole % part:
        raise CheckpointError(f"{part_name} ({part}) must divide {whole_name} ({whole}).")
