"""Fourier resampling of the decoded sound to real time (40 §5.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import RequestError

# The codec was made for 44100 / 2048 = 21.53 latents a second, the model makes 25: its samples are at 51200 Hz.
UP, DOWN = 441, 512


def resample(wave: Tensor, length: int) -> Tensor:
    """Resample [..., n] fp32 to [..., length] over the whole signal, as one period of a periodic one (40 §5.4).

    Frequencies that the shorter length cannot hold are cut; at an even shorter length its middle bin stands for both
    signs, so it is doubled when shortening and halved when lengthening.
    """
    n = wave.shape[-1]
    if n < 1 or length < 1:
        raise RequestError(f"Sound of {n} samples cannot be resampled to {length}; both must be at least 1.")
    shorter = min(n, length)
    spectrum = torch.fft.rfft(wave)[..., : shorter // 2 + 1].clone()
    if shorter % 2 == 0 and n != length:
        spectrum[..., shorter // 2] *= 2.0 if length < n else 0.5
    return torch.fft.irfft(spectrum * (length / n), n=length)


def to_real_time(wave: Tensor) -> Tensor:
    """The decoder's [..., n] samples to [..., int(n * 441 / 512)] at 44100 Hz: 512000 to 441000 for ten seconds."""
    return resample(wave, wave.shape[-1] * UP // DOWN)
