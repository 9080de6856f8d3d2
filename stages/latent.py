"""Bridges between our latent and ComfyUI's, and latents in files (60 §3)."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..magi2_core.codecs.latent_scale import from_wan_scale, to_wan_scale
from ..magi2_core.errors import RequestError
from ..magi2_core.files import replacing
from ..magi2_core.sampling.noise import AUDIO_CHANNELS, VIDEO_CHANNELS
from .folders import Folders, resolve_inside
from .values import ClipLatent

FORMAT = "magi2-latent-1"
SUBFOLDER = "magi2"


def split_latent(magi2_latent: ClipLatent) -> dict[str, Tensor]:
    """The video part as a core LATENT in the scale of the Wan 2.2 VAE: samples fp32 [1, 48, T, H, W]."""
    return {"samples": to_wan_scale(magi2_latent["video"].unsqueeze(0)).contiguous()}


def join_latent(latent: dict[str, Tensor], sound_from: ClipLatent | None = None) -> ClipLatent:
    """A core LATENT in the Wan 2.2 scale back to ours; sound and what made it come from `sound_from` if it is given."""
    video = latent["samples"]
    if video.ndim != 5 or video.shape[1] != VIDEO_CHANNELS:
        raise RequestError(
            f"The latent has the shape {tuple(video.shape)}; the Wan 2.2 VAE makes [1, {VIDEO_CHANNELS}, frames,"
            " height, width]. Latents of other VAEs cannot be used here."
        )
    if video.shape[0] != 1:
        raise RequestError(f"{video.shape[0]} latents arrived in one batch; join one at a time.")
    return {
        "video": from_wan_scale(video.detach().cpu())[0].contiguous(),
        "audio": torch.zeros(0, AUDIO_CHANNELS) if sound_from is None else sound_from["audio"],
        "meta": {} if sound_from is None else dict(sound_from["meta"]),
    }


def write_latent(latent: ClipLatent, path: Path, extra: dict[str, Any] | None = None) -> None:
    """Write a latent as safetensors; nothing stands under the final name until it is finished.

    `extra` (the workflow, for instance) is kept in the file's header beside what made the latent. RequestError if the
    file cannot be written.
    """
    from safetensors.torch import save

    header = {key: json.dumps(value) for key, value in (extra or {}).items()}
    header |= {"format": FORMAT, "meta": json.dumps(latent["meta"])}
    tensors = {"video": latent["video"], "audio": latent["audio"]}
    content = save({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, header)
    with replacing(path) as partial:
        partial.write_bytes(content)


def read_latent(path: Path) -> ClipLatent:
    """Read what `write_latent` wrote; RequestError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise RequestError(f"{path.name} is not a latent that Magi2SaveLatent wrote.")
            video, audio = file.get_tensor("video"), file.get_tensor("audio")
            meta = json.loads(header["meta"])
    except RequestError:
        raise
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise RequestError(f"{path.name} is damaged: {error}.") from error
    if video.ndim != 4 or video.shape[0] != VIDEO_CHANNELS or audio.ndim != 2 or audio.shape[1] != AUDIO_CHANNELS:
        raise RequestError(f"{path.name} holds {tuple(video.shape)} and {tuple(audio.shape)}, which is no clip.")
    return {"video": video.float(), "audio": audio.float(), "meta": meta}


def latent_names(folders: Folders) -> list[str]:
    """The latents in the output folder's magi2/ subfolder, as names relative to the output folder, newest first."""
    found = []
    for folder, _, names in os.walk(folders.output / SUBFOLDER):
        for file in (Path(folder, name) for name in names if name.endswith(".safetensors")):
            try:
                status = file.stat()
            except OSError:  # it went while the list was made
                continue
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime, file.relative_to(folders.output).as_posix()))
    return [name for _, name in sorted(found, reverse=True)]


def load_latent(latent: str, *, folders: Folders) -> ClipLatent:
    """The latent of that name in the output or input folder."""
    return read_latent(resolve_latent(latent, folders))


def resolve_latent(latent: str, folders: Folders) -> Path:
    """Where a named latent lies; RequestError if it is not there or outside both folders."""
    return resolve_inside(latent, (folders.output, folders.input), "latent file")
