"""The noise that a clip starts from (20 §2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import RequestError, check_choice

VIDEO_CHANNELS = 48
AUDIO_CHANNELS = 64
NOISE_DEVICES = ("cpu", "cuda")
# Standard normal fp32 numbers of a shape, drawn in the order of the calls
Draw = Callable[[tuple[int, ...]], Tensor]


def check_seed(seed: int) -> None:
    """Raise RequestError unless the seed is a whole number from 0 to 2^64-1 (20 §2)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise RequestError(f"The seed is {seed!r}; it must be a whole number from 0 to {2**64 - 1}.")


def check_noise_device(noise_device: str, device_type: str) -> None:
    """RequestError unless noise can be drawn on `noise_device` for a clip made on a device of `device_type`."""
    check_choice("The noise device", noise_device, NOISE_DEVICES)
    if noise_device != "cpu" and noise_device != device_type:
        raise RequestError(f"The noise device is {noise_device!r}, but the clip is made on the CPU; choose 'cpu'.")


def noise_generator(seed: int, device: str = "cpu") -> torch.Generator:
    """A generator of its own for one clip: nobody else's random numbers are disturbed, and nobody disturbs these.

    device: "cpu" gives the same numbers on every machine; "cuda" the reference's on the same GPU model, since there
    they depend on the number of processors. Later stages of the same clip go on drawing from it (20 §2, 50 §9).
    Raises RequestError for a seed that is out of range.
    """
    check_seed(seed)
    return torch.Generator(device).manual_seed(seed)


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal fp32 numbers, on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def clip_noise(
    draw: Draw,
    grid: tuple[int, int, int],
    audio_length: int,
    video_channels: int = VIDEO_CHANNELS,
    audio_channels: int = AUDIO_CHANNELS,
) -> tuple[Tensor, Tensor]:
    """Noise of a preview: video [1, C, T, H, W] first, then audio [1, L, C], both fp32 (20 §2)."""
    video = draw((1, video_channels, *grid))
    return video, draw((1, audio_length, audio_channels))
