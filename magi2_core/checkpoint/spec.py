"""What a checkpoint must hold: one table of tensors for each network, with how each divides over ranks.

The tables (`preview_tensors`, `refiner_tensors`, …) stand next to their networks. They are the single source for the
module's shapes, the strict loader, `inspect`, the miniature writer and the memory plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn


class Shard(Enum):
    """How a tensor divides over the ranks of a replica (10 §11)."""

    NONE = "on every rank"
    BANKS = "rows of dim 0, one for each (MoE head, expert) bank"
    HEADS = "rows of dim 0 for all experts of every MoE head that the rank touches"
    COLUMN = "tensor parallel: output rows, inside every modality block and every part"
    ROW = "tensor parallel: input columns"
    HEAD_COLUMNS = "tensor parallel: columns of dim 1, one for each attention head"


@dataclass(frozen=True)
class TensorSpec:
    """Shape on disk, dtype in the model, and division of one tensor.

    `blocks` modality blocks of equal size are stacked on dim 0. `parts` are the row counts inside one block that are
    divided separately (q, k and v of the fused projection); empty means the block is one part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard = Shard.NONE
    blocks: int = 1
    parts: tuple[int, ...] = ()


def table_of(build: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, TensorSpec]:
    """The table of a network that every rank holds whole and in one dtype, read off its module."""
    with torch.device("meta"):
        state = build().state_dict()
    return {name: TensorSpec(tuple(tensor.shape), dtype) for name, tensor in state.items()}
