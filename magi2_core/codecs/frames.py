"""Decoded video to frames, and frames to another size (40 §4.7, §6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _unit_frame(x_3HW: Tensor) -> Tensor:
    """One decoded frame [3, H, W] to [H, W, 3] fp32 in [0, 1]; the affine map is in fp32 (40 §4.7)."""
    return (x_3HW.float() * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0)


def to_uint8(x_13THW: Tensor) -> Tensor:
    """Decoded video [1, 3, T, H, W] in [-1, 1] to frames [T, H, W, 3] uint8 on the host, truncated (40 §4.7)."""
    _, _, T, H, W = x_13THW.shape
    frames = torch.empty(T, H, W, 3, dtype=torch.uint8)
    for t in range(T):  # one frame at a time: an fp32 copy of a 1080p window would be 0.7 GB
        frames[t] = (_unit_frame(x_13THW[0, :, t]) * 255).to(torch.uint8)  # 40 trap 10: truncation
    return frames


def to_float(x_13THW: Tensor) -> Tensor:
    """Decoded video [1, 3, T, H, W] in [-1, 1] to an IMAGE [T, H, W, 3] fp32 in [0, 1] on the host (40 §4.7)."""
    _, _, T, H, W = x_13THW.shape
    frames = torch.empty(T, H, W, 3, dtype=torch.float32)
    for t in range(T):
        frames[t] = _unit_frame(x_13THW[0, :, t])
    return frames


def resize(frames_THW3: Tensor, width: int, height: int) -> Tensor:
    """Frames [T, H, W, 3] uint8 to [T, height, width, 3] uint8: bilinear, not antialiased, truncated (40 §6).

    The truncation lowers about half of the values by one; the aspect is not kept. That is how the reference delivers.
    """
    resized = torch.empty(len(frames_THW3), height, width, 3, dtype=torch.uint8)
    for t, frame in enumerate(frames_THW3):
        x_13HW = (frame.float() / 255).permute(2, 0, 1).unsqueeze(0)
        x_13HW = F.interpolate(x_13HW, (height, width), mode="bilinear", align_corners=False, antialias=False)
        resized[t] = (x_13HW[0].permute(1, 2, 0).clamp(0, 1) * 255).to(torch.uint8)
    return resized
