"""Decoding one window of latents in pieces of the frame, to the same values as at once (40 §4.6).

A pixel depends on latents up to 15 places away, nearly all of it through the convolutions at the latent's own size.
So a tile starts with that margin where it does not meet the border of the frame, and after each stage of the network
gives up the part of the margin that the remaining stages no longer need: at full resolution, where the memory goes,
6 places are left. Beyond the border of the frame the network sees zeros; at a cut edge it sees them too, but what
they reach is cut away before it matters.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .turbo_decoder import PATCH, BlockConfig, TurboConfig, TurboDecoder

Span = tuple[int, int]  # [begin, end) of one axis


@dataclass(frozen=True)
class Tile:
    """A rectangle of the latent, rows [top, bottom) and columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int


def grow(span: Span, reach: int, size: int) -> Span:
    """The span with `reach` more on either side, inside [0, size)."""
    return max(0, span[0] - reach), min(size, span[1] + reach)


def before_block(span: Span, block: BlockConfig, size: int) -> Span:
    """What an up block must be given to make `span` of its output right; `size` is the whole output's (40 §4.4)."""
    reach = 2 * block.layers + block.upsample  # 3x3 convolutions after the enlargement: two to a res block
    span = grow(span, reach, size)
    if block.upsample:
        span, size = (span[0] // 2, -(-span[1] // 2)), size // 2
    return grow(span, 2 if block.cin != block.cout else 0, size)


def stage_spans(span: Span, size: int, config: TurboConfig) -> list[Span]:
    """For latents `span` of `size`: the input each stage needs, and last the output, each in its own resolution.

    Entry k is the input of stage k (TurboDecoder.stages), so entry 0 is in latents and the last one in pixels.
    """
    scale = config.spatial_ratio // PATCH
    wanted = (span[0] * scale, span[1] * scale)
    spans = [(wanted[0] * PATCH, wanted[1] * PATCH), grow(wanted, 1, size * scale)]  # conv_out reaches one
    for block in reversed(config.blocks):
        spans.append(before_block(spans[-1], block, size * scale))
        scale //= 2 if block.upsample else 1
    spans.append(grow(spans[-1], 1 + 2 * config.layers_per_block[-1], size))  # conv_in and the mid block
    return spans[::-1]


def run_tile(decoder: TurboDecoder, latent_1Cnhw: Tensor, first: bool, tile: Tile) -> Tensor:
    """The pixels of one tile of a window: [1, 3, frames, 16 rows, 16 columns] of the de-normalised [1, 48, n, h, w]."""
    rows = stage_spans((tile.top, tile.bottom), latent_1Cnhw.shape[3], decoder.config)
    columns = stage_spans((tile.left, tile.right), latent_1Cnhw.shape[4], decoder.config)
    x = latent_1Cnhw[..., slice(*rows[0]), slice(*columns[0])]
    scales = [1, *(2 if block.upsample else 1 for block in decoder.config.blocks), PATCH]
    for k, (stage, scale) in enumerate(zip(decoder.stages(first), scales, strict=True)):
        x = stage(x)
        top, left = rows[k + 1][0] - rows[k][0] * scale, columns[k + 1][0] - columns[k][0] * scale
        height, width = rows[k + 1][1] - rows[k + 1][0], columns[k + 1][1] - columns[k + 1][0]
        x = x[..., top : top + height, left : left + width]
    return x
