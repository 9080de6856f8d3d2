"""The VIDEO of a clip: ComfyUI's own, but written to a file by the pack (40 §7).

ComfyUI's writer encodes at a lower quality, and with a rate control that reads memory nobody wrote: equal frames then
give other files (80 line 27).
"""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import torch

from ..magi2_core.codecs.media import Sound, write_video
from ..magi2_core.events import Silent
from ..stages.decode import image_blocks
from .comfy import InputImpl, Types, interrupted_check


class ClipVideo(InputImpl.VideoFromComponents):
    """Frames that are shared with the IMAGE they came from, and sound (60 §3)."""

    def save_to(self, path: Any, format: Any = "auto", codec: Any = "auto", metadata: Any = None, **more: Any) -> None:
        """Write an mp4 file with the workflow in its metadata. Other formats, streams and options are ComfyUI's."""
        ours = isinstance(path, str) and path.endswith(".mp4") and not more
        if not ours or format not in ("auto", "mp4") or codec not in ("auto", "h264"):
            super().save_to(path, format=format, codec=codec, metadata=metadata, **more)
            return
        clip = self.get_components()
        sound = None if clip.audio is None else Sound(clip.audio["waveform"][0], clip.audio["sample_rate"])
        texts = {name: json.dumps(value) for name, value in (metadata or {}).items()}
        write_video(path, image_blocks(clip.images), clip.frame_rate, sound, metadata=texts, events=UntilCancelled())


def clip_video(frames: torch.Tensor, audio: dict[str, Any] | None, fps: Fraction) -> ClipVideo:
    """A VIDEO of IMAGE [F, H, W, 3] and AUDIO, which it shares."""
    return ClipVideo(Types.VideoComponents(images=frames, audio=audio, frame_rate=fps))


class UntilCancelled(Silent):
    """Events of what ComfyUI calls without a node of ours: the user's cancel, and nothing else."""

    def check(self) -> None:
        interrupted_check()
