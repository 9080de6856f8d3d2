"""Decoding a clip with the Turbo decoder: sliding windows in time, tiles in space (40 §4.5, §4.6).

Windows are independent of each other: each holds one latent of context on either side, and the frames made of the
context are cut away, nothing is blended. So they can be decoded one at a time, streamed to a file, or divided over
ranks, with the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RequestError
from ..events import SILENT, Events
from .latent_scale import denormalise
from .turbo_decoder import TurboConfig, TurboDecoder
from .turbo_tiles import Tile, run_tile

Convert = Callable[[Tensor], Tensor]  # [1, 3, T, H, W] raw -> [T, H, W, 3] on the host, as in frames.py


@dataclass(frozen=True)
class Window:
    """Latents [start, stop) of the padded clip, and which of the frames made of them belong to the clip.

    `first` says that it begins the clip. `begin` and `end` are frames of the clip; `skip` frames of the window's
    output come before them.
    """

    start: int
    stop: int
    first: bool
    skip: int
    begin: int
    end: int

    @property
    def latents(self) -> int:
        return self.stop - self.start

    @property
    def frames(self) -> int:
        return self.end - self.begin


def plan_windows(latents: int, config: TurboConfig) -> list[Window]:
    """The windows of a clip of `latents` latents, in time order (40 §4.5).

    Together they make temporal_ratio * (latents - 1) + 1 frames: 125 of 32 in five windows, 249 of 63 in nine.
    """
    if latents < 1:
        raise RequestError(f"The video latent has {latents} frames; there is nothing to decode.")
    f, s, r = config.first_chunk_size, config.step_size, config.temporal_ratio
    padded = latents + (f - latents if latents < f else -(latents - f) % s)
    total = r * (latents - 1) + 1  # the frames made of the padding are dropped at the end
    windows = [Window(0, min(f + 1, padded), True, 0, 0, min(r * (f - 1) + 1, total))]
    for i in range(f, padded, s):
        begin = r * (i - 1) + 1
        windows.append(Window(i - 1, min(i + s + 1, padded), False, r, begin, min(begin + r * s, total)))
    return windows


def decode_window(
    decoder: TurboDecoder,
    z_1CThw: Tensor,
    window: Window,
    convert: Convert,
    tiles: Sequence[Tile] | None = None,
    events: Events = SILENT,
) -> Tensor:
    """The frames of one window, as `convert` makes them: [window.frames, H, W, 3] on the host.

    z is the whole clip's latent [1, 48, T, h, w] in the sampler's scale; its dtype is the decoder's. `tiles` divide
    the frame (turbo_tiles.plan_tiles); without them it is decoded at once. `events.check` is called before each tile.
    """
    T, h, w = z_1CThw.shape[2:]
    frames = torch.arange(window.start, window.stop).clamp(max=T - 1)  # 40 §4.5: the last latent is repeated
    latent = denormalise(z_1CThw[:, :, frames.to(z_1CThw.device)])
    kept = slice(window.skip, window.skip + window.frames)
    block: Tensor | None = None
    for tile in tiles or [Tile(0, h, 0, w)]:
        events.check()
        part = convert(run_tile(decoder, latent, window.first, tile)[:, :, kept])
        if tile == Tile(0, h, 0, w):
            return part
        scale = decoder.config.spatial_ratio
        if block is None:
            block = part.new_empty(window.frames, scale * h, scale * w, 3)
        block[:, scale * tile.top : scale * tile.bottom, scale * tile.left : scale * tile.right] = part
    assert block is not None
    return block


def gather_blocks(blocks: Iterator[Tensor], frames: int) -> Tensor:
    """All `frames` frames of the blocks as one tensor [frames, H, W, 3], without a second copy of the clip."""
    clip: Tensor | None = None
    at = 0
    for block in blocks:
        if clip is None:
            clip = block.new_empty(frames, *block.shape[1:])
        clip[at : at + len(block)] = block
        at += len(block)
    if clip is None or at != frames:
        raise RequestError(f"The video decoder made {at} frames instead of {frames}.")
    return clip
