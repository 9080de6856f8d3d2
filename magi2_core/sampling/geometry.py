"""Sizes and lengths of a clip and of its reference picture, in pixels, latents and rows (20 §1, §6.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from ..errors import RequestError, check_choice

SPATIAL_STRIDE = 16  # pixels of one latent, both ways
REFERENCE_STRIDE = 32  # the reference picture's sides are multiples of this
SECONDS = 10.0  # the only length the model knows
PREVIEW_FPS = Fraction(25, 2)
REFINED_FPS = Fraction(25)
AUDIO_LATENT_FPS = 25.0
DECODER_TEMPORAL_STRIDE = 4


@dataclass(frozen=True)
class Tier:
    """One resolution on offer: what the preview stage generates, and what the refiner makes of it, as (long, short)."""

    preview: tuple[int, int]
    refined: tuple[int, int] | None = None


TIERS = {
    "272p": Tier((448, 256)),
    "540p": Tier((896, 512)),
    "1080p": Tier((896, 512), refined=(1920, 1088)),
}
ORIENTATIONS = ("landscape", "portrait")


def tier(resolution: str) -> Tier:
    """The tier of a resolution name; RequestError names the known ones (20 §1.1)."""
    check_choice("The resolution", resolution, TIERS)
    return TIERS[resolution]


def orient(long_short: tuple[int, int], orientation: str) -> tuple[int, int]:
    """(width, height) of a (long, short) size in an orientation (20 §1.1)."""
    check_choice("The orientation", orientation, ORIENTATIONS)
    long, short = long_short
    return (long, short) if orientation == "landscape" else (short, long)


def check_size(width: int, height: int) -> None:
    """Raise RequestError unless both sides are multiples of 16 and at least 32 pixels (20 §1.1, §9).

    The reference floors other sizes without a word; here the caller learns what it would have got.
    """
    real = tuple(max(2, side // SPATIAL_STRIDE) * SPATIAL_STRIDE for side in (width, height))
    if real != (width, height):
        raise RequestError(
            f"The size is {width}x{height}, but both sides must be multiples of {SPATIAL_STRIDE} and at least"
            f" {2 * SPATIAL_STRIDE}; the nearest smaller one is {real[0]}x{real[1]}."
        )


def clip_lengths(seconds: float = SECONDS) -> tuple[int, int]:
    """Video latents T and audio latents L of a clip: 32 and 250 for ten seconds (20 §1.2).

    RequestError if the clip would have no video latent or no audio latent.
    """
    frames = round(seconds * PREVIEW_FPS * 2)  # counted on a 25 fps time line; half to even
    video = math.floor((frames - 1) / 8) + 1
    audio = round(seconds * AUDIO_LATENT_FPS)
    if video < 1 or audio < 1:
        raise RequestError(f"The length is {seconds} seconds, which is too short for a single latent frame.")
    return video, audio


def latent_grid(width: int, height: int) -> tuple[int, int, int]:
    """Latent grid (T, H, W) of a clip of width x height pixels (20 §1). RequestError as `check_size`."""
    check_size(width, height)
    return clip_lengths()[0], height // SPATIAL_STRIDE, width // SPATIAL_STRIDE


def decoded_frames(video_latents: int) -> int:
    """Frames that the decoder makes of T latents: 125 of 32, 249 of 63 (20 §1.2)."""
    return DECODER_TEMPORAL_STRIDE * (video_latents - 1) + 1


def reference_target(image_width: int, image_height: int, width: int, height: int) -> tuple[int, int]:
    """(width, height) of the canvas that a reference picture is fitted into, for a clip of width x height (20 §6.4).

    Only the clip's longer side matters. The integers are multiplied first, then divided once in float64: 110x55 at 448
    gives 224.
    """
    longest = max(width, height)
    if image_width > image_height:
        return longest, int(image_height * longest / image_width)
    return int(image_width * longest / image_height), longest


def reference_size(image_width: int, image_height: int, width: int, height: int) -> tuple[int, int]:
    """(width, height) of the picture that the encoder sees: the canvas floored to multiples of 32 (20 §6.4).

    RequestError if the picture is so long and narrow that a side floors to zero.
    """
    canvas = reference_target(image_width, image_height, width, height)
    real_width, real_height = (side // REFERENCE_STRIDE * REFERENCE_STRIDE for side in canvas)
    if not real_width or not real_height:
        raise RequestError(
            f"The picture is {image_width}x{image_height}, too long and narrow for a {width}x{height} clip: fitted to"
            f" its longer side it would be {canvas[0]}x{canvas[1]}, and both sides need at least {REFERENCE_STRIDE}"
            f" pixels. Crop it to at most {max(width, height) // REFERENCE_STRIDE}:1."
        )
    return real_width, real_height
