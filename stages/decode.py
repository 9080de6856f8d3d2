"""Latents to frames and sound (40 §4, §5)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..magi2_core.errors import RequestError
from ..magi2_core.events import Events
from .checkpoint import check_choice
from .manager import manager
from .values import ClipLatent, DecodedClip, Model

PARTS = ("video and sound", "video only", "sound only")
SAMPLE_RATE = 44_100
FRAME_BLOCK = 16


def decode(model: Model, latent: ClipLatent, parts: str = PARTS[0], *, events: Events) -> DecodedClip:
    """Decode a clip, or one half of it. A latent without sound gives a clip without sound."""
    check_choice("parts", parts, PARTS)
    video, audio = latent["video"], latent["audio"]
    frames = waveform = None
    rate = SAMPLE_RATE
    if parts != "sound only":
        if not torch.isfinite(video).all():
            raise RequestError("The video latent holds NaN or infinite values, so there is nothing to decode.")
        frames = manager.run(model, "decode_video", {"video": video}, events)["frames"]
    if parts != "video only" and audio.shape[0] > 0:
        if not torch.isfinite(audio).all():
            raise RequestError("The audio latent holds NaN or infinite values, so there is nothing to decode.")
        sound = manager.run(model, "decode_audio", {"audio": audio}, events)
        waveform, rate = sound["waveform"], int(sound["sample_rate"])
    if frames is None and waveform is None:
        raise RequestError("This latent has no sound; choose 'video only', or decode a latent that has sound.")
    return DecodedClip(frames, waveform, rate, Fraction(latent["meta"].get("fps", "25/2")))


def image_from_frames(frames: Tensor) -> Tensor:
    """Frames uint8 [F, H, W, 3] as IMAGE: fp32 0..1, filled block by block, so no second copy ever exists (60 §6.7)."""
    image = torch.empty(frames.shape, dtype=torch.float32)
    for first in range(0, frames.shape[0], FRAME_BLOCK):
        torch.div(frames[first : first + FRAME_BLOCK], 255, out=image[first : first + FRAME_BLOCK])
    return image


def audio_from_waveform(waveform: Tensor, sample_rate: int) -> dict[str, Any]:
    """AUDIO: fp32 [1, 2, samples] on the CPU within -1..1, where the built-in writers would clip it anyway."""
    return {"waveform": waveform.float().clamp(-1, 1).unsqueeze(0).contiguous(), "sample_rate": int(sample_rate)}
