"""The normalisation between the video codec's latents and the sampler's (40 §2)."""

from __future__ import annotations

import torch
from torch import Tensor

LATENT_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
LATENT_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip


def _constants(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and std as fp32, shaped to broadcast over [B, 48, ...] on the latent's device.

    They are made here, not kept in a module, so that no blanket cast to bfloat16 can reach them (40 §2).
    """
    shape = (1, len(LATENT_MEAN)) + (1,) * (latent.dim() - 2)
    mean = torch.tensor(LATENT_MEAN, dtype=torch.float32, device=latent.device).view(shape)
    std = torch.tensor(LATENT_STD, dtype=torch.float32, device=latent.device).view(shape)
    return mean, std


def normalise(mu: Tensor) -> Tensor:
    """Encoder mean [B, 48, ...] fp32 to the sampler's scale, fp32: (mu - mean) * (1 / std) (40 §2)."""
    mean, std = _constants(mu)
    return (mu - mean) * (1.0 / std)  # 40 §2: the inverse is taken in fp32


def denormalise(z: Tensor) -> Tensor:
    """Sampler's latent [B, 48, ...] to what the Turbo decoder reads, in z's dtype: z / (1 / std) + mean (40 §2)."""
    mean, std = _constants(z)
    return (z / (1.0 / std) + mean).to(z.dtype)  # 40 §2: fp32 arithmetic, one rounding at the end


def to_wan_scale(z: Tensor) -> Tensor:
    """Sampler's latent [B, 48, ...] to a core LATENT in ComfyUI's Wan 2.2 scale, fp32: z * std + mean (60 §3)."""
    mean, std = _constants(z)
    return z.float() * std + mean


def from_wan_scale(latent: Tensor) -> Tensor:
    """Core LATENT [B, 48, ...] in ComfyUI's Wan 2.2 scale back to the sampler's, fp32: (latent - mean) / std."""
    mean, std = _constants(latent)
    return (latent.float() - mean) / std
