"""How many bytes the stages beside the two transformers take, each by itself on a device: arithmetic on shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch

from ..checkpoint.folder import STABLE_AUDIO, TEXT_ENCODER, TURBO, WAN, CheckpointFolder
from ..checkpoint.problem import BadFileError
from ..checkpoint.shard import local_bytes
from ..codecs.oobleck_decoder import OobleckConfig, oobleck_decoder_tensors
from ..codecs.turbo_decoder import TurboConfig, turbo_decoder_tensors
from ..codecs.turbo_tiles import tile_bytes
from ..codecs.wan_encoder import WanEncoderConfig, wan_encoder_tensors
from ..conditioning.parameters import PREFIX, TextEncoderConfig, text_encoder_tensors
from ..dit.memory import FLOAT
from ..sampling.geometry import SPATIAL_STRIDE, clip_lengths, tier

BF16 = 2  # bytes of an element
TEXT_TOKENS = 2_000  # assumed for both prompts together when memory is estimated
# fp32 tensors as wide as the values that the linear attention of transformers 5 holds at once without its kernels.
_LINEAR_ATTENTION = 14


@dataclass(frozen=True)
class StageMemory:
    """weights: bytes that stay while the stage is loaded. working: bytes beside them while it runs at full speed, and
    `least` at its slowest, for a decoder that can work in smaller tiles."""

    weights: int
    working: int
    least: int

    @property
    def peak(self) -> int:
        return self.weights + self.working


def side_stages(folder: CheckpointFolder, resolution: str) -> dict[str, StageMemory]:
    """Memory of every stage but the transformers that the checkpoint has, by the engine's names, for a resolution.

    Without the workspace of convolutions. A stage with a broken configuration is left out; what makes it unusable is
    for `inspect_checkpoint` to say.
    """
    size = tier(resolution)
    width, height = size.refined or size.preview
    stages: dict[str, tuple[str, Callable[[], StageMemory]]] = {
        "text_encoder": (TEXT_ENCODER, lambda: text_encoder_memory(folder.text_config(), TEXT_TOKENS)),
        "image_encoder": (WAN, lambda: image_encoder_memory(folder.wan_config(), max(size.preview))),
        "video_decoder": (TURBO, lambda: video_decoder_memory(folder.turbo_config(), width, height)),
        "audio_decoder": (STABLE_AUDIO, lambda: audio_decoder_memory(folder.oobleck_config(), clip_lengths()[1])),
    }
    found = {}
    for name, (place, memory) in stages.items():
        with suppress(BadFileError):
            if (folder.root / place).is_dir():
                found[name] = memory()
    return found


def text_encoder_memory(config: TextEncoderConfig, tokens: int) -> StageMemory:
    """One layer at a time on the device, with both prompts of half the tokens each (30 §12)."""
    layers: dict[str, int] = defaultdict(int)
    for name, spec in text_encoder_tensors(config).items():
        if name.startswith(f"{PREFIX}layers."):
            layers[name.removeprefix(f"{PREFIX}layers.").split(".")[0]] += prod(spec.shape) * spec.dtype.itemsize
    mlp = (3 * config.intermediate_size + 2 * config.hidden_size) * BF16
    values = config.linear_num_value_heads * config.linear_value_head_dim
    attention = _LINEAR_ATTENTION * values * FLOAT if "linear_attention" in config.types else 0
    working = max(layers.values()) + tokens * config.hidden_size * BF16 + tokens // 2 * max(mlp, attention)
    return StageMemory(0, working, working)  # no layer stays


def image_encoder_memory(config: WanEncoderConfig, longest: int) -> StageMemory:
    """For a square picture, the largest that fits a clip whose longer side is `longest` pixels (20 §6.4).

    The first blocks count, at half the sides: five tensors, beside the pixels and their patches.
    """
    working = longest**2 * (5 * config.widths[0] + 2 * 3 * FLOAT)
    return StageMemory(local_bytes(wan_encoder_tensors(config), None), working, working)


def video_decoder_memory(config: TurboConfig, width: int, height: int) -> StageMemory:
    """A window of a clip of that many pixels: the whole frame at once, or in tiles of a single latent (40 §4.6)."""
    rows, columns = height // SPATIAL_STRIDE, width // SPATIAL_STRIDE
    whole, least = (tile_bytes(config, rows, columns, side, torch.bfloat16) for side in (max(rows, columns), 1))
    return StageMemory(local_bytes(turbo_decoder_tensors(config), None), whole, least)


def audio_decoder_memory(config: OobleckConfig, latents: int) -> StageMemory:
    """The widest block counts: its input, and three tensors of its output in a residual unit (40 §5.2)."""
    length, working = latents, 0
    for cin, cout, stride in zip(config.widths, config.widths[1:], config.strides[::-1], strict=False):
        working = max(working, FLOAT * length * (cin + 3 * cout * stride))
        length *= stride
    return StageMemory(local_bytes(oobleck_decoder_tensors(config), None), working, working)
