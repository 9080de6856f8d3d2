"""Decoding one window of latents in pieces of the frame, to the same values as at once, in bounded memory (40 §4.6).

A pixel depends on latents up to 15 places away, nearly all of it through the convolutions at the latent's own size.
So a tile starts with that margin where it does not meet the border of the frame, and after each step of the network
gives up the part of the margin that the remaining steps no longer need: at full resolution, where the memory goes,
little is left. Beyond the border of the frame the network sees zeros; at a cut edge it sees them too, but what they
reach is cut away before it matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor, nn

from ..errors import RequestError
from ..precision import true_fp32
from .turbo_decoder import PATCH, Conv3d, ResBlock, Step, TurboConfig, TurboDecoder, Upsample

Span = tuple[int, int]  # [begin, end) of one axis


@dataclass(frozen=True)
class Tile:
    """A rectangle of the latent, rows [top, bottom) and columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int


def step_spans(span: Span, size: int, steps: Sequence[Step]) -> list[Span]:
    """For latents `span` of `size`: the input that each step needs, and last the output, each in its own resolution."""
    sizes = [size]
    for step in steps:
        sizes.append(sizes[-1] * step.scale)
    enlarged = sizes[-1] // size
    spans = [(span[0] * enlarged, span[1] * enlarged)]
    for step, whole in zip(reversed(steps), reversed(sizes), strict=False):
        begin, end = max(0, spans[-1][0] - step.reach), min(whole, spans[-1][1] + step.reach)
        spans.append((begin // step.scale, -(-end // step.scale)))
    return spans[::-1]


def run_tile(decoder: TurboDecoder, latent_1Cnhw: Tensor, first: bool, tile: Tile) -> Tensor:
    """The pixels of one tile of a window: [1, 3, frames, 16 rows, 16 columns] of the de-normalised [1, 48, n, h, w]."""
    steps = decoder.steps(first)
    rows = step_spans((tile.top, tile.bottom), latent_1Cnhw.shape[3], steps)
    columns = step_spans((tile.left, tile.right), latent_1Cnhw.shape[4], steps)
    x = latent_1Cnhw[..., slice(*rows[0]), slice(*columns[0])]
    for k, step in enumerate(steps):
        with true_fp32():
            x = step.run(x)
        top, left = rows[k][0] * step.scale, columns[k][0] * step.scale  # of what the step made
        (begin, end), (start, stop) = rows[k + 1], columns[k + 1]
        x = x[..., begin - top : end - top, start - left : stop - left]
    return x


def plan_tiles(config: TurboConfig, height: int, width: int, budget: int, dtype: torch.dtype) -> list[Tile]:
    """Divide a latent frame of height x width so that one tile's activations stay within `budget` bytes.

    The tiles are about square and as large as the budget allows: one tile if that fits. RequestError if tiles of a
    single latent do not fit; the sentence says what is needed.
    """
    low, high = 0, max(height, width)  # the largest side that fits, by bisection
    while low < high:
        side = (low + high + 1) // 2
        if tile_bytes(config, height, width, side, dtype) <= budget:
            low = side
        else:
            high = side - 1
    if low == 0:
        raise RequestError(
            f"Decoding a frame of {width * config.spatial_ratio}x{height * config.spatial_ratio} needs at least"
            f" {tile_bytes(config, height, width, 1, dtype) / 2**20:.0f} MiB of working memory, but only"
            f" {budget / 2**20:.0f} MiB are allowed for it."
        )
    rows, columns = split_span(height, low), split_span(width, low)
    return [Tile(*row, *column) for row in rows for column in columns]


def split_span(size: int, longest: int) -> list[Span]:
    """[0, size) in as few spans of at most `longest` as it takes, their lengths within one of each other."""
    parts = -(-size // longest)
    return list(pairwise(size * k // parts for k in range(parts + 1)))


def tile_bytes(config: TurboConfig, height: int, width: int, side: int, dtype: torch.dtype) -> int:
    """Peak bytes of activations while tiles of at most side x side latents are decoded, in the longest window.

    Counted as the network holds them (40 §4.6), without the convolutions' own workspace, the weights and the finished
    frames. With a side that covers the frame this is the peak of the whole frame.
    """
    steps = _steps(config)
    tall, wide = (_longest(split_span(size, side), size, steps) for size in (height, width))
    frames, peak = config.step_size + 2, 0
    held = config.latent_channels * frames * tall[0] * wide[0] * dtype.itemsize
    for k, step in enumerate(steps):
        live, made = _step_bytes(step.module, frames, tall[k] * wide[k], dtype.itemsize)
        peak = max(peak, held + live)
        held = made
        if isinstance(step.module, Upsample) and step.module.time_conv is not None:
            frames *= 2
    return peak


@cache
def _steps(config: TurboConfig) -> list[Step]:
    with torch.device("meta"):
        return TurboDecoder(config).steps(first=False)


def _longest(spans: Sequence[Span], size: int, steps: Sequence[Step]) -> list[int]:
    """The longest input that any of the spans needs at each step."""
    lengths = [[end - begin for begin, end in step_spans(span, size, steps)] for span in spans]
    return [max(each) for each in zip(*lengths, strict=True)]


def _step_bytes(module: nn.Module, T: int, area: int, itemsize: int) -> tuple[int, int]:
    """Most bytes that a step holds beside its input of T frames of `area` positions, and the bytes of its output."""
    value = area * itemsize  # bytes of one channel of one frame
    if isinstance(module, ResBlock):
        cin, cout = module.conv1.conv.in_channels, module.conv1.conv.out_channels
        made = cout * T * value
        live = max(_conv_bytes(cin, T + 2, made, area, value), made + _conv_bytes(cout, T + 2, 0, area, value))
        if module.conv_shortcut is not None:
            live = max(live, made + _conv_bytes(cin, T, made, area, value))
        return live, made
    if isinstance(module, Upsample):
        made = 4 * (2 if module.time_conv is not None else 1) * module.conv.in_channels * T * value
        return made, made  # what else it holds is less than the next step's padded copy of what it made
    if isinstance(module, Conv3d):
        made = module.conv.out_channels * T * value
        return _conv_bytes(module.conv.in_channels, T + 2, made, area, value), made
    made = 3 * PATCH * PATCH * T * value  # unpatchify only moves values
    return made, made


def _conv_bytes(channels: int, frames: int, made: int, area: int, value: int) -> int:
    """A convolution's padded input, and beside it first the fp32 copies of one frame in the norm, then the output."""
    return channels * frames * value + max(3 * 4 * channels * area, made)
