"""Decoded video to frames, and frames to another size (40 §4.7, §6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def to_uint8(x_13THW: Tensor) -> Tensor:
    """Decoded video [1, 3, T, H, W] in [-1, 1] to frames [T, H, W, 3] uint8 on the host, truncated (40 §4.7)."""
    _, _, T, H, W = x_13THW.shape
    frames = torch.empty(T, H, W, 3, dtype=torch.uint8)
    for t in range(T):  # one frame at a time: an fp32 copy of a 1080p window would be 0.7 GB
        # 40 §4.7: an affine map in fp32; trap 10: truncation
        frames[t] = ((x_13THW[0, :, t].float() * 0.5 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255).to(torch.uint8)
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
