"""Which part of every tensor belongs to one rank (10 §11): pure arithmetic over the tensor tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from ...distributed.layout import RankShare
from ..errors import CheckpointError
from .spec import Shard, TensorSpec

Region = tuple[slice, ...]
"""One slice, with its ends given, for each dimension of the tensor on disk."""


def local_slices(spec: TensorSpec, share: RankShare | None) -> tuple[Region, ...]:
    """The regions of the tensor on disk that the rank holds, in order; joined on dim 0 they are its local tensor.

    None stands for a rank that holds everything. A rank without experts gets one region with no rows. Raises
    CheckpointError where the layout does not divide the tensor (10 §11.2).
    """
    whole = tuple(slice(0, size) for size in spec.shape)
    if share is None or spec.shard is Shard.NONE:
        return (whole,)
    if spec.shard is Shard.BANKS:
        return ((slice(share.banks.first_bank, share.banks.last_bank), *whole[1:]),)
    if spec.shard is Shard.HEADS:
        return ((_head_rows(share), *whole[1:]),)
    if share.tp == 1:
        return (whole,)
    if spec.shard is Shard.COLUMN:
        return tuple((rows, *whole[1:]) for rows in _column_rows(spec, share))
    # ROW and HEAD_COLUMNS both divide dim 1.
    width = _divide(spec.shape[1], share, spec)
    return ((whole[0], slice(share.tp_rank * width, (share.tp_rank + 1) * width), *whole[2:]),)


def local_shape(spec: TensorSpec, share: RankShare | None) -> tuple[int, ...]:
    """Shape of the tensor that the rank holds; equal to the shape on disk when `share` is None."""
    regions = local_slices(spec, share)
    return (sum(region_shape(region)[0] for region in regions), *region_shape(regions[0])[1:]) if spec.shape else ()


def local_bytes(table: Mapping[str, TensorSpec], share: RankShare | None) -> int:
    """Bytes that the rank holds of a network, at the dtypes of the model (10 §11.3)."""
    return sum(prod(local_shape(spec, share)) * spec.dtype.itemsize for spec in table.values())


def region_shape(region: Region) -> tuple[int, ...]:
    """Shape of the tensor that a region cuts out."""
    return tuple(part.stop - part.start for part in region)


def _head_rows(share: RankShare) -> slice:
    """Rows of every expert of the heads that the rank touches, also where it holds only some of a head's experts:
    both owners of a divided head route its tokens themselves (70 §5)."""
    banks = share.banks
    return slice(banks.first_head * banks.experts, banks.last_head * banks.experts)


def _column_rows(spec: TensorSpec, share: RankShare) -> Iterator[slice]:
    """Row ranges of a column-parallel tensor: each part of each modality block is divided by itself (10 §11.2)."""
    start = 0
    block_rows = spec.shape[0] // spec.blocks
    for part_rows in (spec.parts or (block_rows,)) * spec.blocks:
        rows = _divide(part_rows, share, spec)
        yield slice(start + share.tp_rank * rows, start + (share.tp_rank + 1) * rows)
        start += part_rows


def _divide(size: int, share: RankShare, spec: TensorSpec) -> int:
    if size % share.tp:
        raise CheckpointError(
            f"A tensor of shape {list(spec.shape)} has {size} rows or columns to divide over {share.tp} "
            "tensor-parallel ranks, which leaves a remainder. Choose a tensor-parallel size that divides them."
        )
    return size // share.tp
