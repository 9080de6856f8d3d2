"""Which tokens see which: the video in blocks, each of which sees its neighbours, and a tail that all see (50 §5, §6).

Everything here is arithmetic on block counts and sizes; nothing grows with the square of the tokens, except the
explicit `mask`, which is for small sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from ..errors import RequestError, check_choice

Axes = tuple[int, int, int]
Range = tuple[int, int]
Window = tuple[Range, ...]


@dataclass(frozen=True)
class WindowSettings:
    """How far a token sees; the defaults are the released ones (50 §2).

    The product uses nothing else; the reference's other modes are there because recorded results use them.
    grid: blocks of `block` tokens (t, h, w), each sees the blocks within `radius` blocks on every axis. scan: the same
    blocks in a row, each sees `win_size` consecutive ones. frame: the blocks are whole frames in raster order, each
    sees the frames within `frame_receptive_field` (all, if that is negative). Raises RequestError for bad values.
    """

    mode: str = "grid"
    block: Axes = (8, 4, 4)
    radius: Axes = (2, 2, 2)
    win_size: int = 384
    frame_receptive_field: int = -1

    def __post_init__(self) -> None:
        check_choice("The window mode", self.mode, ("grid", "scan", "frame"))
        if min(self.block) < 1 or min(self.radius) < 0 or self.win_size < 1:
            raise RequestError(
                f"The window has blocks of {self.block}, a radius of {self.radius} and a size of {self.win_size};"
                " blocks and size must be at least 1, the radius at least 0."
            )


@dataclass(frozen=True)
class BlockPlan:
    """The blocks of one sequence: `tail` rows of sound and text follow the video of `grid` (t, h, w) tokens.

    block: tokens of a whole block on each axis; the last one of an axis may be shorter. starts: the first packed row of
    each block, then the number of video rows. windows: the blocks in a grid; for each place on each of its axes, the
    first and last place that is seen from there. A block sees the product of the three.
    """

    grid: Axes
    tail: int
    block: Axes
    starts: tuple[int, ...]
    windows: tuple[Window, Window, Window]

    @property
    def blocks(self) -> int:
        return len(self.starts) - 1

    @property
    def video(self) -> int:
        """Video rows."""
        return self.starts[-1]

    @property
    def tokens(self) -> int:
        return self.video + self.tail

    @cached_property
    def largest(self) -> int:
        """Rows of the largest block."""
        return max((stop - start for start, stop in pairwise(self.starts)), default=0)

    @cached_property
    def key_runs(self) -> tuple[Window, ...]:
        """For each block, the runs [first, last) of consecutive blocks that it sees, in row order."""
        return tuple(self._runs(*seen) for seen in product(*self.windows))

    def _runs(self, seen_t: Range, seen_h: Range, seen_w: Range) -> Window:
        height, width = len(self.windows[1]), len(self.windows[2])
        runs: list[Range] = []
        for t, h in product(range(seen_t[0], seen_t[1] + 1), range(seen_h[0], seen_h[1] + 1)):
            row = (t * height + h) * width
            first, last = row + seen_w[0], row + seen_w[1] + 1
            if runs and runs[-1][1] == first:  # rows that are seen over their full width join
                first, _ = runs.pop()
            runs.append((first, last))
        return tuple(runs)

    def order(self) -> Tensor:
        """The raster row of each packed video row, int64 [video]: block by block, both in raster order (50 §5)."""
        t, h, w = (torch.arange(size) // step for size, step in zip(self.grid, self.block, strict=True))
        block_THW = (t[:, None, None] * (h[-1] + 1) + h[:, None]) * (w[-1] + 1) + w
        return block_THW.flatten().argsort(stable=True)

    def block_of_rows(self) -> Tensor:
        """The block of each packed row, int64 [tokens]; rows of the tail have `blocks`."""
        sizes = torch.tensor([*(stop - start for start, stop in pairwise(self.starts)), self.tail])
        return torch.arange(self.blocks + 1).repeat_interleave(sizes)

    def mask(self) -> Tensor:
        """allowed[i, j]: row i sees row j, bool [tokens, tokens]; only for small sequences (50 §6)."""
        allowed = torch.zeros(self.blocks + 1, self.blocks + 1, dtype=torch.bool)
        allowed[-1], allowed[:, -1] = True, True
        for block, runs in enumerate(self.key_runs):
            for first, last in runs:
                allowed[block, first:last] = True
        rows = self.block_of_rows()
        return allowed[rows][:, rows]


def plan_blocks(grid: Axes, tail: int, settings: WindowSettings) -> BlockPlan:
    """Divide a video of `grid` (t, h, w) tokens, followed by `tail` other rows. RequestError for an empty video."""
    if min(grid) < 1 or tail < 0:
        raise RequestError(f"The video grid is {grid}, with {tail} rows after it; every size must be at least 1.")
    block = (1, *grid[1:]) if settings.mode == "frame" else settings.block
    lengths = [_lengths(size, step) for size, step in zip(grid, block, strict=True)]
    starts = [0, *accumulate(t * h * w for t, h, w in product(*lengths))]
    counts = tuple(len(axis) for axis in lengths)
    windows: tuple[Window, Window, Window]
    if settings.mode == "scan":
        windows = (((0, 0),), ((0, 0),), _scan(len(starts) - 1, settings.win_size))
    elif settings.mode == "frame":
        reach = settings.frame_receptive_field
        windows = (_within(counts[0], reach if reach >= 0 else counts[0]), ((0, 0),), ((0, 0),))
    else:
        t, h, w = (_within(count, radius) for count, radius in zip(counts, settings.radius, strict=True))
        windows = (t, h, w)
    return BlockPlan(grid, tail, block, tuple(starts), windows)


def _lengths(size: int, step: int) -> list[int]:
    """Tokens of each block along an axis; the last may be short."""
    return [min(step, size - start) for start in range(0, size, step)]


def _within(count: int, radius: int) -> Window:
    return tuple((max(0, place - radius), min(count - 1, place + radius)) for place in range(count))


def _scan(count: int, size: int) -> Window:
    """Windows of `size` blocks around each one, moved inwards at both ends so that they stay full (50 §6)."""
    size = min(size, count)
    firsts = (min(max(place - size // 2, 0), count - size) for place in range(count))
    return tuple((first, first + size - 1) for first in firsts)
