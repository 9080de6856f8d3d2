"""The values that travel on the graph's links. Plain data: the graph caches them, and they outlive any pool (60 §5)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypedDict

from torch import Tensor

from ..magi2_core.memory.plan import Plan


@dataclass(frozen=True)
class Model:
    """MAGI2_MODEL: which checkpoint runs how. No weights, no processes, no locks.

    `identity` changes when a file of the checkpoint is replaced, so that a pool is never reused for other weights.
    """

    name: str
    plan: Plan
    identity: tuple[tuple[str, int, int], ...]


class Conditioning(TypedDict):
    """MAGI2_CONDITIONING: what the clip should show, encoded. Tensors are on the CPU.

    features [L, D] and null_features [Ln, D] bf16: both prompts. markers [M, D] bf16: one vector for each picture.
    pictures: uint8 [H, W, 3] each; the sampler encodes them at the size that it generates.
    """

    model: Model
    features: Tensor
    null_features: Tensor
    markers: Tensor
    pictures: list[Tensor]
    figures: list[int]
    prompt: str
    negative_prompt: str
    encoded_prompt: str
    tokens: int
    warnings: list[str]


class ClipLatent(TypedDict):
    """MAGI2_LATENT: video [48, T, H, W] and audio [L, 64] fp32 on the CPU, and `meta`, what made them."""

    video: Tensor
    audio: Tensor
    meta: dict[str, Any]


class SamplerOptions(TypedDict):
    """MAGI2_SAMPLER_OPTIONS: the sampler's settings that are seldom touched; 0x0 means the resolution's own size."""

    width: int
    height: int
    noise_device: str
    guidance: dict[str, Any]


@dataclass(frozen=True)
class DecodedClip:
    """A finished clip: frames uint8 [F, H, W, 3] and waveform fp32 [2, samples], either of them None if left out.

    file: the clip as mp4, with its sound, where the frames were written there as they were decoded. size: (width,
    height) and count: number of the frames, wherever they are.
    """

    frames: Tensor | None
    waveform: Tensor | None
    sample_rate: int
    fps: Fraction
    file: Path | None = None
    size: tuple[int, int] = (0, 0)
    count: int = 0
