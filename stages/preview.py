"""A small picture of a latent while it is being sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LONGEST = 512


def preview_image(
    latent_CTHW: Tensor, factors: Sequence[Sequence[float]], bias: Sequence[float], frame: int
) -> Any:
    """One latent frame as a PIL image by a linear map of its channels to colours, enlarged to at most 512 px.

    `factors` [C, 3] and `bias` [3] map the sampler's latent to -1..1, as ComfyUI's own previews do.
    """
    from PIL import Image

    latent_CHW = latent_CTHW[:, frame % latent_CTHW.shape[1]].float().cpu()
    colours = torch.einsum("chw,cr->rhw", latent_CHW, torch.tensor(factors)) + torch.tensor(bias)[:, None, None]
    scale = max(1, LONGEST // max(colours.shape[1:]))
    enlarged = F.interpolate(colours[None], scale_factor=scale, mode="bilinear", align_corners=False)[0]
    pixels_HWC = ((enlarged + 1) / 2).clamp(0, 1).mul(255).to(torch.uint8).permute(1, 2, 0).contiguous()
    return Image.fromarray(pixels_HWC.numpy())
