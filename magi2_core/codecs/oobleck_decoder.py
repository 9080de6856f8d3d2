"""The Oobleck audio decoder of Stable Audio Open 1.0, latents to a stereo waveform (40 §5).

Shapes here: B batch, C channels, L audio latents or samples; `x_BCL`. All arithmetic is fp32 (40 §5.3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoint.spec import TensorSpec, table_of
from ..errors import CheckpointError
from ..events import SILENT, Events
from ..precision import true_fp32

OOBLECK_PREFIX = "pretransform.model.decoder."  # of these names in the checkpoint file (40 §5.1)
DILATIONS = (1, 3, 9)


@dataclass(frozen=True)
class OobleckConfig:
    """Architecture of the audio decoder, as in the released model_config.json; lists are in encoder order (40 §5.1)."""

    channels: int = 128
    c_mults: tuple[int, ...] = (1, 2, 4, 8, 16)
    strides: tuple[int, ...] = (2, 4, 4, 8, 8)
    latent_dim: int = 64
    out_channels: int = 2
    sample_rate: int = 44100

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OobleckConfig:
        """Read the content of the released JSON.

        The codec stands under model.pretransform.config, or directly under model in a file of the codec alone.
        CheckpointError for a codec that this decoder is not (40 §5.1).
        """
        model = values.get("model", {})
        pretransform = model.get("pretransform")
        codec = model if pretransform is None else pretransform.get("config", {})
        kind = values.get("model_type", "autoencoder") if pretransform is None else pretransform.get("type")
        if kind != "autoencoder":
            raise CheckpointError(f"The audio codec's type is {kind!r}; only 'autoencoder' is supported.")
        decoder = codec.get("decoder", {}).get("config", {})
        _refuse_other_forms(codec, decoder)
        try:
            config = cls(
                channels=decoder["channels"],
                c_mults=tuple(decoder["c_mults"]),
                strides=tuple(decoder["strides"]),
                latent_dim=decoder["latent_dim"],
                out_channels=decoder["out_channels"],
                sample_rate=values["sample_rate"],
            )
        except KeyError as error:
            raise CheckpointError(f"The audio codec's configuration lacks {error.args[0]}.") from None
        config._check(codec)
        return config

    def _check(self, codec: Mapping[str, Any]) -> None:
        ratio = codec.get("downsampling_ratio", self.ratio)
        if ratio != self.ratio:
            raise CheckpointError(
                f"The audio codec's downsampling_ratio is {ratio}, but its strides multiply to {self.ratio}."
            )
        if len(self.strides) != len(self.c_mults):
            raise CheckpointError(
                f"The audio decoder has {len(self.strides)} strides for {len(self.c_mults)} c_mults; there must be as"
                " many of one as of the other."
            )
        if odd := [stride for stride in self.strides if stride % 2]:
            raise CheckpointError(f"The audio decoder has a stride of {odd[0]}; only even strides give whole lengths.")

    @property
    def ratio(self) -> int:
        """Samples of one audio latent: 2048."""
        return math.prod(self.strides)

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels from the first convolution to the last block: 2048, 1024, 512, 256, 128, 128 (40 §5.2)."""
        return tuple(self.channels * mult for mult in (*self.c_mults[::-1], 1))


def _refuse_other_forms(codec: Mapping[str, Any], decoder: Mapping[str, Any]) -> None:
    """CheckpointError for the forms of the codec that the released one does not use (40 §5.1)."""
    for key, value, wanted in (
        ("decoder.type", codec.get("decoder", {}).get("type"), "oobleck"),
        ("bottleneck.type", codec.get("bottleneck", {}).get("type"), "vae"),
        ("decoder.config.use_snake", decoder.get("use_snake"), True),
        ("decoder.config.final_tanh", decoder.get("final_tanh", True), False),  # 40 trap 8: true when absent
        ("decoder.config.soft_clip", decoder.get("soft_clip", False), False),
        ("decoder.config.use_nearest_upsample", decoder.get("use_nearest_upsample", False), False),
    ):
        if value != wanted:
            raise CheckpointError(f"The audio codec's {key} is {value!r}; only {wanted!r} is supported.")


class WeightNormConv(nn.Module):
    """A convolution stored as direction and length, W = g * v / ||v||; `fold` makes W once, after loading (40 §5.2)."""

    def __init__(self, shape: tuple[int, int, int], bias: int | None) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.empty(shape[0], 1, 1))
        self.weight_v = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(bias)) if bias is not None else None

    def fold(self) -> None:
        """Replace weight_g and weight_v by the weight; the norm is over all dimensions but the first (40 trap 7)."""
        norm = self.weight_v.flatten(1).norm(dim=1).view(-1, 1, 1)
        self.weight = nn.Parameter((self.weight_g * self.weight_v / norm).detach(), requires_grad=False)
        del self.weight_g, self.weight_v


class Conv(WeightNormConv):
    """Same-length convolution."""

    def __init__(self, cin: int, cout: int, kernel: int, dilation: int = 1, bias: bool = True) -> None:
        super().__init__((cout, cin, kernel), cout if bias else None)
        self.dilation, self.padding = dilation, dilation * (kernel // 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight, self.bias, padding=self.padding, dilation=self.dilation)


class Upsample(WeightNormConv):
    """Transposed convolution with a kernel of two strides: L to stride * L for even strides."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__((cin, cout, 2 * stride), cout)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(x, self.weight, self.bias, stride=self.stride, padding=-(-self.stride // 2))


class Snake(nn.Module):
    """x + sin(exp(alpha) x)^2 / (exp(beta) + 1e-9), for each channel (40 §5.2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def forward(self, x_BCL: Tensor) -> Tensor:
        alpha, beta = self.alpha.exp().view(-1, 1), self.beta.exp().view(-1, 1)
        return (x_BCL * alpha).sin_().square_().mul_(1.0 / (beta + 1e-9)).add_(x_BCL)


class ResidualUnit(nn.Module):
    """Snake, dilated convolution, snake, 1x1 convolution, added to the input."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Snake(channels), Conv(channels, channels, 7, dilation), Snake(channels), Conv(channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).add_(x)


class DecoderBlock(nn.Module):
    """Snake, upsampling, three residual units."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        units = (ResidualUnit(cout, dilation) for dilation in DILATIONS)
        self.layers = nn.Sequential(Snake(cin), Upsample(cin, cout, stride), *units)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class OobleckDecoder(nn.Module):
    """Audio latents [B, 64, L] to a waveform [B, 2, 2048 L], not limited to +-1 (40 §5.3).

    `fold` must be called once after the checkpoint's tensors have been loaded.
    """

    def __init__(self, config: OobleckConfig) -> None:
        super().__init__()
        self.config = config
        widths = config.widths
        blocks = [DecoderBlock(*each) for each in zip(widths, widths[1:], config.strides[::-1], strict=False)]
        self.layers = nn.ModuleList([
            Conv(config.latent_dim, widths[0], 7), *blocks, Snake(widths[-1]),
            Conv(widths[-1], config.out_channels, 7, bias=False),
        ])  # fmt: skip

    def fold(self) -> None:
        """Fold every weight norm; the state dictionary no longer has the checkpoint's names after it (40 §5.2)."""
        for module in self.modules():
            if isinstance(module, WeightNormConv):
                module.fold()

    def forward(self, z_BCL: Tensor, events: Events = SILENT) -> Tensor:
        """`events.check` is called before each layer."""
        x = z_BCL
        with true_fp32():
            for layer in self.layers:
                events.check()
                x = layer(x)
        return x


def oobleck_decoder_tensors(config: OobleckConfig) -> dict[str, TensorSpec]:
    """Name (without OOBLECK_PREFIX), shape and dtype of the decoder's 182 tensors, before folding (40 §5.1)."""
    return table_of(lambda: OobleckDecoder(config), torch.float32)
