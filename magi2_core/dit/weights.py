"""Modules made from the tensor table: each parameter has this rank's shape, so shapes are written down once only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...distributed.layout import RankShare
from ..checkpoint.shard import local_shape
from ..checkpoint.spec import TensorSpec
from .runs import block


@dataclass(frozen=True)
class Tensors:
    """The part of a network's tensor table below one prefix, as seen by one rank."""

    table: Mapping[str, TensorSpec]
    share: RankShare
    prefix: str = ""

    def at(self, name: str) -> Tensors:
        """The part one level down."""
        return Tensors(self.table, self.share, f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        """Whether the network has this tensor."""
        return f"{self.prefix}{name}" in self.table

    def __getitem__(self, name: str) -> nn.Parameter:
        """A new, unfilled parameter on torch's current default device, in this rank's shape."""
        spec = self.table[f"{self.prefix}{name}"]
        return nn.Parameter(torch.empty(local_shape(spec, self.share), dtype=spec.dtype), requires_grad=False)


class Weight(nn.Module):
    """One operator's tensors: `weight`, with one block for each modality or a single one, and `bias` if it has one."""

    bias: nn.Parameter | None

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.blocks = tensors.table[f"{tensors.prefix}weight"].blocks
        self.weight = tensors["weight"]
        self.register_parameter("bias", tensors["bias"] if tensors.has("bias") else None)

    def of(self, modality: int) -> Tensor:
        """The block of `weight` that rows of this modality use."""
        return block(self.weight, modality, self.blocks)
