"""The embedding of a row's own diffusion time (20 §6.5)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def time_embedding(time: float, width: int = 64) -> Tensor:
    """One row [width], fp32, of a time tau (an fp32 value, 0 for clean rows): cosines, then sines.

    width 0 gives an empty row, 1 the time itself, an odd width one zero at the end.
    """
    raw = torch.tensor([time], dtype=torch.float32)
    if width < 2:
        return raw[:width]
    half = width // 2
    exponents = -math.log(10000) * torch.arange(half, dtype=torch.float32) / half
    # fp32 exponents, rounded once after exp: fp32 exp is an ulp off on some machines, which times 999 is visible
    frequencies = torch.exp(exponents.double()).float()
    angles = (raw * 1000) * frequencies  # 20 §6.5: divide by 1000, then multiply again; some values move by one ulp
    return torch.cat([angles.cos(), angles.sin(), torch.zeros(width % 2)])
