"""Rotary position embedding over time, height and width (10 §4, 50 §3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import RequestError

TEMPERATURE = 10000


def rotary_bands(head_dim: int) -> Tensor:
    """The fp32 frequencies 1 / 10000^(k/B), k = 0..B-1, B = head_dim / 8: bit for bit what checkpoints store."""
    count = head_dim // 8
    return 1 / TEMPERATURE ** (torch.arange(count, dtype=torch.float32) / count)


def rotary_table(coords_T9: Tensor, bands_B: Tensor) -> Tensor:
    """Sines then cosines of every row's angles: [T, 6B] fp32, each half ordered time, height, width.

    coords columns: position t, h, w; size t, h, w; reference size t, h, w (10 §2), fp32. Positions may be negative or
    beyond the size. Raises RequestError where an axis of size 1 has another reference size.
    """
    position_T3, size_T3, reference_T3 = coords_T9.float().unflatten(1, (3, 3)).unbind(1)
    scale_T3 = (reference_T3 - 1) / (size_T3 - 1)
    scale_T3 = scale_T3.masked_fill((reference_T3 == 1) & (size_T3 == 1), 1.0)
    if not scale_T3.isfinite().all():
        row = int((~scale_T3.isfinite()).any(1).nonzero()[0])
        raise RequestError(
            f"Token {row} has size {size_T3[row].tolist()} and reference size {reference_T3[row].tolist()}; "
            "an axis of size 1 must have reference size 1."
        )
    center_T3 = (size_T3 - 1) / 2
    center_T3[:, 0] = 0  # 10 §4: time is never centered
    angle_T3B = ((position_T3 - center_T3) * scale_T3)[..., None] * bands_B.to(coords_T9.device)
    angle_TA = angle_T3B.flatten(1)
    return torch.cat([angle_TA.sin(), angle_TA.cos()], dim=1)


def rotate(x_THd: Tensor, table_TR: Tensor) -> Tensor:
    """Rotate the first 6B channels of every head by the rows' angles; the rest pass (10 §4). fp32 in, fp32 out.

    The pairs are (i, i + 3B): half-split inside the rotated channels, not inside all of them.
    """
    half = table_TR.shape[1] // 2
    sin, cos = table_TR[:, None].split(half, dim=-1)
    a, b, rest = x_THd.split([half, half, x_THd.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
