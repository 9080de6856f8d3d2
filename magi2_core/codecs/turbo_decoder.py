"""The Turbo video decoder network: one window of latents to frames (40 §4.1 to §4.4).

Shapes here: B batch, C channels, T frames, H rows, W columns; `x_BCTHW`. Activations have the dtype of the weights;
norm statistics are fp32. Norms and upsampling go frame by frame, so that no fp32 or enlarged copy of a whole window
exists: the values are the same, the memory is a third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint.spec import TensorSpec, table_of
from ..errors import CheckpointError
from ..precision import true_fp32

TURBO_PREFIX = "decoder."  # of these names in the checkpoint file (40 §4.2)
PATCH = 2  # pixels of one patch, both ways
NORM_EPS = 1e-8  # 40 §4.3: everywhere but in the shortcut
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TurboConfig:
    """Architecture and windows of the decoder, as in the released JSON; lists are in encoder order (40 §4.1)."""

    latent_channels: int = 48
    block_out_channels: tuple[int, ...] = (64, 128, 256, 512)
    layers_per_block: tuple[int, ...] = (2, 2, 2, 3, 3)
    scaling: tuple[bool, ...] = (False, True, True, True)
    spatio_only: tuple[bool, ...] = (False, True, False, False)
    resnet_norm_eps: float = 1e-6
    first_chunk_size: int = 7
    step_size: int = 7

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TurboConfig:
        """Read the content of the released JSON; unknown and training-only keys are ignored (40 §4.1).

        CheckpointError if a key that shapes the result is missing, or if it asks for a form that this decoder has not.
        """
        _refuse_other_forms(values)
        widths = tuple(_required(values, "decoder_block_out_channels"))
        config = cls(
            latent_channels=_required(values, "latent_channels"),
            block_out_channels=widths,
            layers_per_block=tuple(_required(values, "decoder_layers_per_block")),
            scaling=tuple(_required(values, "decoder_spatio_temporal_scaling")),
            spatio_only=tuple(values.get("decoder_spatio_only") or (False,) * len(widths)),
            resnet_norm_eps=values.get("resnet_norm_eps", 1e-6),
            first_chunk_size=_required(values, "first_chunk_size"),
            step_size=_required(values, "step_size"),
        )
        config._check(values)
        return config

    def _check(self, values: Mapping[str, Any]) -> None:
        blocks = len(self.block_out_channels)
        for name, length, expected in (
            ("decoder_layers_per_block", len(self.layers_per_block), blocks + 1),
            ("decoder_spatio_temporal_scaling", len(self.scaling), blocks),
            ("decoder_spatio_only", len(self.spatio_only), blocks),
        ):
            if length != expected:
                raise CheckpointError(
                    f"The Turbo decoder's {name} has {length} entries; {blocks} entries of decoder_block_out_channels"
                    f" need {expected}."
                )
        for name, own in (("spatial", self.spatial_ratio), ("temporal", self.temporal_ratio)):
            stated = values.get(f"{name}_compression_ratio", own)
            if stated != own:
                raise CheckpointError(
                    f"The Turbo decoder's {name}_compression_ratio is {stated}, but its blocks enlarge by {own}."
                )
        if min(self.first_chunk_size, self.step_size) < 1:
            raise CheckpointError(
                f"The Turbo decoder's first_chunk_size and step_size are {self.first_chunk_size} and {self.step_size};"
                " both must be at least 1."
            )

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """The up blocks in the order of the decoder: every list reversed (40 §4.4)."""
        widths = self.block_out_channels[::-1]
        return tuple(
            BlockConfig(cin, cout, layers, scale, not only)
            for cin, cout, layers, scale, only in zip(
                (widths[0], *widths), widths, self.layers_per_block[-2::-1], self.scaling[::-1],
                self.spatio_only[::-1], strict=False,
            )
        )  # fmt: skip

    @property
    def spatial_ratio(self) -> int:
        """Pixels of one latent, both ways: 16."""
        return PATCH * 2 ** sum(block.upsample for block in self.blocks)

    @property
    def temporal_ratio(self) -> int:
        """Frames of one latent: 4."""
        return 2 ** sum(block.upsample and block.time for block in self.blocks)


@dataclass(frozen=True)
class BlockConfig:
    """One up block: a `conv_in` where the widths differ, an upsampler (in time too), and `layers` res blocks."""

    cin: int
    cout: int
    layers: int
    upsample: bool
    time: bool


def _required(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise CheckpointError(f"The Turbo decoder's configuration lacks {key}; the decode depends on it.")
    return values[key]


def _refuse_other_forms(values: Mapping[str, Any]) -> None:
    """CheckpointError for the forms of the class that the released decoder does not use (40 §4.1)."""
    for key, ok, wanted in (
        ("decoder_causal", not values.get("decoder_causal", False), "false"),
        ("decoder_is_dw_conv", not any(values.get("decoder_is_dw_conv", ())), "false for every block"),
        ("use_unpatchify", values.get("use_unpatchify") is True, "true"),
        ("patch_size", values.get("patch_size") == PATCH, str(PATCH)),
        ("patch_size_t", values.get("patch_size_t", 1) == 1, "1"),
        ("out_channels", values.get("out_channels", 3) == 3, "3"),
    ):
        if not ok:
            raise CheckpointError(f"The Turbo decoder's {key} is {values.get(key)!r}; only {wanted} is supported.")


class Conv3d(nn.Module):
    """A convolution over time and space; its input already holds the repeated end frames (40 §4.3)."""

    def __init__(self, cin: int, cout: int, kernel: int | tuple[int, int, int]) -> None:
        super().__init__()
        space = kernel if isinstance(kernel, int) else kernel[1]
        self.conv = nn.Conv3d(cin, cout, kernel, padding=(0, space // 2, space // 2))
        self.margin = (self.conv.kernel_size[0] - 1) // 2

    def forward(self, x_BCTHW: Tensor) -> Tensor:
        if not lacks_bfloat16(x_BCTHW):
            return self.conv(x_BCTHW)
        B, C, T, H, W = x_BCTHW.shape
        out = channels_last(x_BCTHW, B, self.conv.out_channels, T - 2 * self.margin, H, W)
        # torch gives fp32 convolutions to its fast library only above 20480 values of C * T * H
        parts = max(1, out.shape[2] // (20480 // (C * H) + 1))
        for begin, end in pairwise(out.shape[2] * k // parts for k in range(parts + 1)):
            out[:, :, begin:end] = convolve_in_fp32(self.conv, x_BCTHW[:, :, begin : end + 2 * self.margin])
        return out

    def padded(self, x_BCTHW: Tensor, each: Activation = lambda frame: frame) -> Tensor:
        """`each(frame)` for every frame, with the first and the last repeated as this convolution needs (40 §4.3)."""
        B, C, T, H, W = x_BCTHW.shape
        out = channels_last(x_BCTHW, B, C, T + 2 * self.margin, H, W)
        for t in range(T):
            out[:, :, self.margin + t] = each(x_BCTHW[:, :, t])
        for t in range(self.margin):
            out[:, :, t] = out[:, :, self.margin]
            out[:, :, -1 - t] = out[:, :, -1 - self.margin]
        return out


def channels_last(like: Tensor, *shape: int) -> Tensor:
    """An empty activation whose frames are contiguous [H, W, C]: what convolutions on CPU and CUDA work fastest in.

    For other layouts torch 2.9 with cuDNN before 9.15 has a bf16 convolution that takes many times the memory.
    """
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=torch.channels_last_3d)


def lacks_bfloat16(x: Tensor) -> bool:
    """Whether x is bfloat16 on a processor that convolves it hundreds of times slower than fp32."""
    on_host = x.dtype == torch.bfloat16 and x.device.type == "cpu"
    return on_host and "AVX512" not in torch.backends.cpu.get_cpu_capability()


def convolve_in_fp32(conv: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """What a bfloat16 convolution means: exact products, an fp32 sum, one rounding."""
    run = F.conv3d if x.dim() == 5 else F.conv2d
    return run(x.float(), conv.weight.float(), cast(Tensor, conv.bias).float(), padding=conv.padding).to(x.dtype)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean over channels of x^2 + eps), fp32 inside, one rounding at the end, no weight (40 §4.3)."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(1, keepdim=True) + eps)).to(x.dtype)


class ResBlock(nn.Module):
    """Two convolutions behind norm and activation; the shortcut, where there is one, is normed too (40 §4.3)."""

    def __init__(self, cin: int, cout: int, first: Activation, shortcut_eps: float) -> None:
        super().__init__()
        self.conv1 = Conv3d(cin, cout, 3)
        self.conv2 = Conv3d(cout, cout, 3)
        self.conv_shortcut = Conv3d(cin, cout, 1) if cin != cout else None
        self.first, self.shortcut_eps = first, shortcut_eps

    def forward(self, x: Tensor) -> Tensor:
        # 40 trap 6: the norm is rounded to the dtype of x before the activation
        h = self.conv1(self.conv1.padded(x, lambda frame: self.first(rms_norm(frame, NORM_EPS))))
        h = self.conv2.padded(h, lambda frame: F.silu(rms_norm(frame, NORM_EPS)))  # the unnormed h is freed here
        h = self.conv2(h)
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(self.conv_shortcut.padded(x, lambda frame: rms_norm(frame, self.shortcut_eps)))
        return h.add_(x)


class Upsample(nn.Module):
    """Double the sides, and with `time` the frames: 2T, or 2T - 1 in the first window (40 §4.3)."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.time_conv = Conv3d(channels, 2 * channels, (3, 1, 1)) if time else None
        self.resample = nn.ModuleList([nn.Identity(), nn.Conv2d(channels, channels, 3, padding=1)])

    @property
    def conv(self) -> nn.Conv2d:
        """The convolution after the enlargement; the checkpoint calls it resample.1."""
        return cast(nn.Conv2d, self.resample[1])

    def forward(self, x_BCTHW: Tensor, first: bool) -> Tensor:
        if self.time_conv is None:
            return self._enlarge([x_BCTHW[:, :, t] for t in range(x_BCTHW.shape[2])])
        halves = self.time_conv(self.time_conv.padded(x_BCTHW)).chunk(2, dim=1)
        frames = [half[:, :, t] for t in range(x_BCTHW.shape[2]) for half in halves]
        return self._enlarge(frames[1:] if first else frames)

    def _enlarge(self, frames: list[Tensor]) -> Tensor:
        B, C, H, W = frames[0].shape
        out = channels_last(frames[0], B, C, len(frames), 2 * H, 2 * W)
        for t, frame in enumerate(frames):
            large = F.interpolate(frame, scale_factor=2.0, mode="nearest")
            out[:, :, t] = convolve_in_fp32(self.conv, large) if lacks_bfloat16(large) else self.conv(large)
        return out


@dataclass(frozen=True)
class Step:
    """One step of the network: what it runs, and how its output depends on its input in space.

    A pixel of the output depends on `reach` more pixels on either side of its place, in the output's resolution, which
    is `scale` times the input's. `module` is what does the work.
    """

    run: Activation
    module: nn.Module
    reach: int
    scale: int = 1


class ResBlocks(nn.Module):
    """Res blocks of one width: the mid block, and the part of an up block after the enlargement."""

    def __init__(self, width: int, layers: int, first: Activation, shortcut_eps: float) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(width, width, first, shortcut_eps) for _ in range(layers))

    def steps(self) -> list[Step]:
        return [Step(resnet, resnet, reach=2) for resnet in self.resnets]


class UpBlock(ResBlocks):
    """Change the width, enlarge, then res blocks, which start with ReLU after an upsampler (40 §4.4)."""

    def __init__(self, block: BlockConfig, shortcut_eps: float) -> None:
        super().__init__(block.cout, block.layers, F.relu if block.upsample else F.silu, shortcut_eps)
        if block.cin != block.cout:
            self.conv_in = ResBlock(block.cin, block.cout, F.silu, shortcut_eps)
        if block.upsample:
            self.upsamplers = nn.ModuleList([Upsample(block.cout, block.time)])
        self.block = block

    def all_steps(self, first: bool) -> list[Step]:
        steps = [Step(self.conv_in, self.conv_in, reach=2)] if self.block.cin != self.block.cout else []
        if self.block.upsample:
            upsample = cast(Upsample, self.upsamplers[0])
            steps.append(Step(lambda x: upsample(x, first), upsample, reach=1, scale=2))
        return steps + self.steps()


class TurboDecoder(nn.Module):
    """One window of n de-normalised latents to 4n - 3 frames if it is the first of the clip, else 4n (40 §4.4)."""

    def __init__(self, config: TurboConfig) -> None:
        super().__init__()
        blocks, eps = config.blocks, config.resnet_norm_eps
        self.config = config
        self.conv_in = Conv3d(config.latent_channels, blocks[0].cin, 3)
        self.mid_block = ResBlocks(blocks[0].cin, config.layers_per_block[-1], F.silu, eps)
        self.up_blocks = nn.ModuleList(UpBlock(block, eps) for block in blocks)
        self.conv_out = Conv3d(blocks[-1].cout, 3 * PATCH * PATCH, 3)

    def forward(self, z_BCThw: Tensor, first: bool) -> Tensor:
        """[B, 48, n, h, w] to [B, 3, frames, 16h, 16w], nominally in [-1, 1], not clamped."""
        x = z_BCThw
        with true_fp32():
            for step in self.steps(first):
                x = step.run(x)
        return x

    def steps(self, first: bool) -> list[Step]:
        """The network as a chain of steps, between which a tile can be cut smaller (turbo_tiles.py)."""
        return [
            Step(lambda z: self.conv_in(self.conv_in.padded(z)), self.conv_in, reach=1),
            *self.mid_block.steps(),
            *(step for block in self.up_blocks for step in cast(UpBlock, block).all_steps(first)),
            Step(self._last_conv, self.conv_out, reach=1),
            Step(unpatchify, nn.Identity(), reach=0, scale=PATCH),
        ]

    def _last_conv(self, x: Tensor) -> Tensor:
        return self.conv_out(self.conv_out.padded(x, lambda frame: F.silu(rms_norm(frame, NORM_EPS))))


def unpatchify(x_BCTHW: Tensor) -> Tensor:
    """Channels to 2x2 pixels: channel c*4 + dx*2 + dy is the pixel (2h + dy, 2w + dx) (40 §4.3)."""
    B, C, T, H, W = x_BCTHW.shape
    x = x_BCTHW.view(B, C // PATCH**2, PATCH, PATCH, T, H, W)
    return x.permute(0, 1, 4, 5, 3, 6, 2).reshape(B, C // PATCH**2, T, PATCH * H, PATCH * W)


def turbo_decoder_tensors(config: TurboConfig) -> dict[str, TensorSpec]:
    """Name (without TURBO_PREFIX), shape and dtype in the model of the decoder's 80 tensors (40 §4.2)."""
    return table_of(lambda: TurboDecoder(config), torch.bfloat16)
