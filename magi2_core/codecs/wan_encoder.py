"""The Wan 2.2 video encoder, used for reference pictures, one frame at a time (40 §3).

Shapes here: B batch, C channels, T frames, H rows, W columns; `x_BCTHW`. All arithmetic is fp32 (40 §3.8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint.spec import TensorSpec, table_of
from ..errors import CheckpointError, RequestError
from ..precision import true_fp32
from .latent_scale import normalise

PATCH = 2  # pixels of one patch, both ways (40 §3.2)


@dataclass(frozen=True)
class WanEncoderConfig:
    """Widths of the encoder; the defaults are the released model (40 §3.2)."""

    dim: int = 160
    z_dim: int = 48
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)

    def __post_init__(self) -> None:
        if len(self.temporal_downsample) != len(self.dim_mult) - 1:
            raise CheckpointError(
                f"temporal_downsample has {len(self.temporal_downsample)} entries; dim_mult with {len(self.dim_mult)}"
                f" needs {len(self.dim_mult) - 1}, one between each two blocks."
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels after conv1 and after each down block: 160, 160, 320, 640, 640."""
        return tuple(self.dim * m for m in (1, *self.dim_mult))


class CausalConv3d(nn.Conv3d):
    """A convolution that sees only earlier frames: zero frames in front, none behind (40 §3.3)."""

    def __init__(self, cin: int, cout: int, kernel: int) -> None:
        super().__init__(cin, cout, kernel)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        k = self.kernel_size[2]
        if x_BCTHW.shape[2] == 1:  # 40 §3.5: one frame meets the zeros and then the last slice of the kernel
            return F.conv2d(x_BCTHW.squeeze(2), self.weight[:, :, -1], self.bias, padding=k // 2).unsqueeze(2)
        return F.conv3d(F.pad(x_BCTHW, (k // 2, k // 2, k // 2, k // 2, k - 1, 0)), self.weight, self.bias)


class RMSNorm(nn.Module):
    """Norm over channels: x / max(||x||, 1e-12) * sqrt(C) * gamma (40 §3.3)."""

    def __init__(self, channels: int, trailing: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels, *(1,) * trailing))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1, eps=1e-12) * math.sqrt(x.shape[1]) * self.gamma


class ResidualBlock(nn.Module):
    """Norm, SiLU, convolution, twice; added to the input or to its 1x1x1 convolution (40 §3.3)."""

    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            RMSNorm(cin, 3), nn.SiLU(), CausalConv3d(cin, cout, 3),
            RMSNorm(cout, 3), nn.SiLU(), nn.Identity(), CausalConv3d(cout, cout, 3),
        )  # fmt: skip  # the Identity keeps the checkpoint's numbering: a dropout of 0 stood there
        self.shortcut = CausalConv3d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + self.shortcut(x)


class AttentionBlock(nn.Module):
    """Single-head attention over the positions of each frame (40 §3.3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, 2)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        B, C, T, H, W = x_BCTHW.shape
        frames = x_BCTHW.transpose(1, 2).reshape(B * T, C, H, W)
        qkv = self.to_qkv(self.norm(frames)).view(B * T, 1, 3 * C, H * W).transpose(2, 3).contiguous()
        q, k, v = qkv.chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(B * T, C, H, W)
        return x_BCTHW + self.proj(out).view(B, T, C, H, W).transpose(1, 2)


class Downsample(nn.Module):
    """Halve the sides, and with `time` also the frames after the first (40 §3.3)."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.resample = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(channels, channels, 3, stride=2))
        self.time_conv = nn.Conv3d(channels, channels, (3, 1, 1), stride=(2, 1, 1)) if time else None

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        B, C, T, H, W = x_BCTHW.shape
        frames = self.resample(x_BCTHW.transpose(1, 2).reshape(B * T, C, H, W))
        x = frames.view(B, T, C, *frames.shape[2:]).transpose(1, 2)
        if self.time_conv is None or T == 1:
            return x
        # 40 §3.4: the first frame passes through; each later chunk starts from the last frame of the one before, which
        # over the whole clip is one unpadded convolution
        return torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)


def average_shortcut(x_BCTHW: Tensor, cout: int, ft: int, fs: int) -> Tensor:
    """Fold ft frames and fs x fs positions into channels and average groups of them down to `cout` (40 §3.3).

    Missing frames are zeros in front, so a single frame fills only the last time slot.
    """
    B, C, T, H, W = x_BCTHW.shape
    x = F.pad(x_BCTHW, (0, 0, 0, 0, -T % ft, 0))
    x = x.view(B, C, x.shape[2] // ft, ft, H // fs, fs, W // fs, fs).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(B, cout, C * ft * fs * fs // cout, *x.shape[5:]).mean(2)


class DownBlock(nn.Module):
    """Residual blocks and a downsampling, added to the average of the input (40 §3.4)."""

    def __init__(self, cin: int, cout: int, blocks: int, space: bool, time: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = [ResidualBlock(cin if i == 0 else cout, cout) for i in range(blocks)]
        if space:
            layers.append(Downsample(cout, time))
        self.downsamples = nn.Sequential(*layers)
        self.cout, self.ft, self.fs = cout, 2 if time else 1, 2 if space else 1

    def forward(self, x: Tensor) -> Tensor:
        return self.downsamples(x) + average_shortcut(x, self.cout, self.ft, self.fs)


class EncoderTrunk(nn.Module):
    """From patches [B, 12, T, H, W] to mean and log-variance before the last 1x1x1 convolution (40 §3.4)."""

    def __init__(self, config: WanEncoderConfig) -> None:
        super().__init__()
        widths, last = config.widths, config.widths[-1]
        down = (*((True, time) for time in config.temporal_downsample), (False, False))
        self.conv1 = CausalConv3d(3 * PATCH * PATCH, widths[0], 3)
        self.downsamples = nn.Sequential(*(
            DownBlock(cin, cout, config.num_res_blocks, *flags)
            for cin, cout, flags in zip(widths, widths[1:], down, strict=False)
        ))
        self.middle = nn.Sequential(ResidualBlock(last, last), AttentionBlock(last), ResidualBlock(last, last))
        self.head = nn.Sequential(RMSNorm(last, 3), nn.SiLU(), CausalConv3d(last, 2 * config.z_dim, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.downsamples(self.conv1(x))))


class WanEncoder(nn.Module):
    """Pixels to the mean of the posterior; parameters are named as in Wan2.2_VAE.pth (40 §3.1)."""

    def __init__(self, config: WanEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = EncoderTrunk(config)
        self.conv1 = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.one_frame = False

    def keep_one_frame(self) -> None:
        """Drop the weights that one frame never meets: 598.5 MB become 215.5 MB (40 §3.5).

        The state dictionary no longer has the checkpoint's shapes after it.
        """
        self.one_frame = True
        for module in self.modules():
            if isinstance(module, CausalConv3d):
                module.weight = nn.Parameter(module.weight.detach()[:, :, -1:].clone(), requires_grad=False)
            elif isinstance(module, Downsample):
                module.time_conv = None

    def forward(self, x_B3THW: Tensor) -> Tensor:
        """Pixels [B, 3, T, H, W] fp32 in [-1, 1], sides multiples of 16, to mu [B, 48, t, H/16, W/16] fp32.

        Frames beyond 1 + 4 * floor((T - 1) / 4) are dropped (40 §3.4); the product passes one frame.
        """
        T = x_B3THW.shape[2]
        if T > 1 and self.one_frame:
            raise RequestError(f"The picture encoder keeps only the weights for one frame, but was given {T} frames.")
        with true_fp32():
            patches = patchify(x_B3THW[:, :, : 1 + (T - 1) // 4 * 4])
            return self.conv1(self.encoder(patches))[:, : self.config.z_dim]


def patchify(x_B3THW: Tensor) -> Tensor:
    """2x2 pixels to channels: index c*4 + dx*2 + dy, the column offset slower than the row offset (40 §3.4)."""
    B, C, T, H, W = x_B3THW.shape
    x = x_B3THW.view(B, C, T, H // PATCH, PATCH, W // PATCH, PATCH)
    return x.permute(0, 1, 6, 4, 2, 3, 5).reshape(B, C * PATCH * PATCH, T, H // PATCH, W // PATCH)


def encode_picture(encoder: WanEncoder, pixels_131HW: Tensor) -> Tensor:
    """A prepared picture [1, 3, 1, H, W] to its latent [1, 48, 1, H/16, W/16] fp32 in the sampler's scale (40 §1)."""
    device = encoder.conv1.weight.device
    return normalise(encoder(pixels_131HW.to(device, torch.float32)))


def wan_encoder_tensors(config: WanEncoderConfig) -> dict[str, TensorSpec]:
    """Name, shape and dtype of every tensor of the encoder: 86 of the 196 of the released file (40 §0)."""
    return table_of(lambda: WanEncoder(config), torch.float32)
