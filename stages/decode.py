"""Latents to frames and sound (40 §4, §5), or straight to a video file where the frames would be too many."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..magi2_core.codecs.frames import resize
from ..magi2_core.codecs.media import DEFAULT_CRF, LARGEST_SIDE
from ..magi2_core.errors import RequestError, check_choice
from ..magi2_core.events import Events
from ..magi2_core.sampling.geometry import PREVIEW_FPS, SPATIAL_STRIDE, decoded_frames
from .folders import Folders
from .manager import manager
from .values import ClipLatent, DecodedClip, Model

PARTS = ("video and sound", "video only", "sound only")
MAKE_FRAMES = ("auto", "always", "never")
MOST_IMAGE_BYTES = 2 << 30  # as IMAGE; a 540p clip takes 0.7 GB, a 1080p clip 6.2 GB
SAMPLE_RATE = 44_100
FRAME_BLOCK = 16


def decode(
    model: Model,
    latent: ClipLatent,
    parts: str = PARTS[0],
    make_frames: str = MAKE_FRAMES[0],
    output_width: int = 0,
    output_height: int = 0,
    *,
    events: Events,
    folders: Folders,
) -> DecodedClip:
    """Decode a clip, or one half of it. A latent without sound gives a clip without sound.

    Frames that are not to be made go from the decoder to an mp4 file in the temporary folder, one window at a time;
    "auto" does so where they would take more than MOST_IMAGE_BYTES as IMAGE. A size other than 0x0 rescales the frames
    (40 §6).
    """
    check_choice("parts", parts, PARTS)
    check_choice("make_frames", make_frames, MAKE_FRAMES)
    check_output_size(output_width, output_height)
    video, audio = latent["video"], latent["audio"]
    fps = Fraction(latent["meta"].get("fps", PREVIEW_FPS))
    if parts != "sound only" and not torch.isfinite(video).all():
        raise RequestError("The video latent holds NaN or infinite values, so there is nothing to decode.")
    waveform, rate = _decode_sound(model, audio, events) if parts != "video only" else (None, SAMPLE_RATE)
    if parts == "sound only":
        if waveform is None:
            raise RequestError("This latent has no sound; choose 'video only', or decode a latent that has sound.")
        return DecodedClip(None, waveform, rate, fps)
    made = SPATIAL_STRIDE * video.shape[3], SPATIAL_STRIDE * video.shape[2]
    size, count = (output_width, output_height) if output_width else made, decoded_frames(video.shape[1])
    if make_frames == "always" or (make_frames == "auto" and image_bytes(*size, count) <= MOST_IMAGE_BYTES):
        frames = manager.run(model, "decode_video", {"video": video}, events)["frames"]
        frames = frames if size == made else resize(frames, *size)
        return DecodedClip(frames, waveform, rate, fps, None, size, count)
    folders.temp.mkdir(parents=True, exist_ok=True)
    file = folders.temp / f"magi2_{secrets.token_hex(8)}.mp4"
    request = {"path": str(file), "crf": DEFAULT_CRF, "fps": str(fps), "size": None if size == made else size}
    manager.run(model, "write_clip", {"video": video, "waveform": waveform, "sample_rate": rate, **request}, events)
    manager.clips.add(file)
    return DecodedClip(None, waveform, rate, fps, file, size, count)


def check_output_size(output_width: int, output_height: int) -> None:
    """RequestError unless the frames can be rescaled to this size for a video; 0x0 leaves them as they are."""
    size = f"The output size is {output_width}x{output_height}"
    if (output_width == 0) != (output_height == 0):
        raise RequestError(f"{size}; give both sides, or 0 for both to keep the clip's.")
    sides = (output_width, output_height)
    if output_width and (any(side % 2 for side in sides) or not 2 <= min(sides) <= max(sides) <= LARGEST_SIDE):
        raise RequestError(f"{size}; both sides must be even and 2 to {LARGEST_SIDE}.")


def image_bytes(width: int, height: int, frames: int) -> int:
    """Bytes of a clip's frames as IMAGE: fp32, three colours."""
    return 12 * width * height * frames


def describe_clip(clip: DecodedClip) -> str:
    """What the node shows of a clip that went straight to a file, and why nodes that want frames do not run."""
    gigabytes = image_bytes(*clip.size, clip.count) / 1e9
    return (
        f"{clip.count} frames of {clip.size[0]}x{clip.size[1]} went straight to the video. As frames they would take"
        f" {gigabytes:.2g} GB of memory; set make_frames to always if you need them."
    )


def _decode_sound(model: Model, audio: Tensor, events: Events) -> tuple[Tensor | None, int]:
    if audio.shape[0] == 0:
        return None, SAMPLE_RATE
    if not torch.isfinite(audio).all():
        raise RequestError("The audio latent holds NaN or infinite values, so there is nothing to decode.")
    sound = manager.run(model, "decode_audio", {"audio": audio}, events)
    return sound["waveform"], int(sound["sample_rate"])


def image_from_frames(frames: Tensor) -> Tensor:
    """Frames uint8 [F, H, W, 3] as IMAGE: fp32 0..1, filled block by block, so no second copy ever exists (60 §6.7)."""
    image = torch.empty(frames.shape, dtype=torch.float32)
    for first in range(0, frames.shape[0], FRAME_BLOCK):
        torch.div(frames[first : first + FRAME_BLOCK], 255, out=image[first : first + FRAME_BLOCK])
    return image


def image_blocks(image: Tensor) -> Iterator[Tensor]:
    """IMAGE [F, H, W, 3] fp32 0..1 as frames uint8, a block at a time; what `image_from_frames` made comes back."""
    for block in image.split(FRAME_BLOCK):
        yield (block * 255).round().clamp(0, 255).to(torch.uint8)


def audio_from_waveform(waveform: Tensor, sample_rate: int) -> dict[str, Any]:
    """AUDIO: fp32 [1, 2, samples] on the CPU within -1..1, where the built-in writers would clip it anyway."""
    return {"waveform": waveform.float().clamp(-1, 1).unsqueeze(0).contiguous(), "sample_rate": int(sample_rate)}
