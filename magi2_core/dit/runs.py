"""Which rows of a sequence use which modality's weights, as a few contiguous runs.

Every operation of the transformer but attention is per row (10 §2), so instead of sorting the rows by modality the
operators walk over runs. A run is one matrix product with one block of a weight; a long one is cut into pieces so that
temporary fp32 tensors stay small.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

MODALITIES = 3
"""Blocks of a weight with a part for each modality: video, audio, text. A time row is a text row (10 §2)."""

# Bytes of one fp32 temporary of the widest row-wise operation: it stays in cache on a CPU, and on a GPU leaves the
# matrix products large.
_PIECE_BYTES = {"cpu": 2 << 20}
_PIECE_BYTES_GPU = 512 << 20
_SMALLEST_PIECE = 256


class Run(NamedTuple):
    """Rows [start, stop) of one modality (0 video, 1 audio, 2 text)."""

    modality: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def modality_runs(modality: Tensor) -> tuple[Run, ...]:
    """The runs of equal values in `modality`, in row order; no rows give no runs."""
    values, counts = modality.unique_consecutive(return_counts=True)
    stops = counts.cumsum(0)
    return tuple(Run(*run) for run in zip(values.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))


def pieces(runs: Iterable[Run], limit: int) -> tuple[Run, ...]:
    """Cut runs into pieces of at most `limit` rows."""
    return tuple(
        Run(run.modality, start, min(start + limit, run.stop))
        for run in runs
        for start in range(run.start, run.stop, limit)
    )


def piece_rows(width: int, device_type: str) -> int:
    """Rows of a piece of row-wise operations, of which the widest has fp32 rows of `width`."""
    return max(_PIECE_BYTES.get(device_type, _PIECE_BYTES_GPU) // (4 * width), _SMALLEST_PIECE)


def block(weight: Tensor, modality: int, blocks: int) -> Tensor:
    """The part of a weight for one modality: block `modality` of `blocks` equal ones on dim 0, or all of it (10 §5)."""
    if blocks == 1:
        return weight
    size = weight.shape[0] // blocks
    return weight[modality * size : (modality + 1) * size]
