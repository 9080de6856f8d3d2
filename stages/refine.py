"""A preview's latents to 1080p: the second stage (50)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ..magi2_core.errors import RequestError
from ..magi2_core.events import Events
from ..magi2_core.refiner.stage import RefinerSettings
from ..magi2_core.sampling.geometry import REFINED_FPS, SPATIAL_STRIDE, orient, tier
from ..magi2_core.sampling.noise import NOISE_DEVICES, check_seed
from .manager import manager
from .values import ClipLatent, Conditioning, Model

LARGEST_SIDE = 4096
CLIPS_OWN = -1


def refined_size(latent_width: int, latent_height: int, width: int, height: int) -> tuple[int, int]:
    """(width, height) in pixels: the asked one, or for 0x0 that of 1080p in the orientation of the latent."""
    if (width == 0) != (height == 0):
        raise RequestError(
            f"The refined size is {width}x{height}; give both sides, or 0 for both to get 1920x1088 or 1088x1920."
        )
    if width and height:
        if width % SPATIAL_STRIDE or height % SPATIAL_STRIDE or max(width, height) > LARGEST_SIDE:
            raise RequestError(
                f"The refined size is {width}x{height}; both sides must be multiples of {SPATIAL_STRIDE} and at most"
                f" {LARGEST_SIDE}. 1080p is made at 1088 lines."
            )
        return width, height
    refined = tier("1080p").refined
    assert refined is not None
    return orient(refined, "landscape" if latent_width >= latent_height else "portrait")


def refiner_settings(
    steps: int = 5,
    video_guidance: float = 2.0,
    noise_value: int = 220,
    shift: float = 5.0,
    width: int = 0,
    height: int = 0,
    audio_noise_scale: float = -1.0,
    audio_guidance: float = 5.0,
    use_cfg_trick: bool = False,
    cfg_trick_start_frame: int = 13,
    cfg_trick_value: float = 2.0,
    attention: str = "auto",
    *,
    latent_size: tuple[int, int] = (2, 1),
) -> RefinerSettings:
    """The settings of the stage for latents of (width, height); RequestError if any of them cannot be used."""
    width, height = refined_size(*latent_size, width, height)
    return RefinerSettings(
        width=width, height=height, steps=steps, shift=shift, noise_value=noise_value,
        video_txt_guidance_scale=video_guidance, audio_txt_guidance_scale=audio_guidance,
        audio_noise_scale=audio_noise_scale, use_cfg_trick=use_cfg_trick, cfg_trick_start_frame=cfg_trick_start_frame,
        cfg_trick_value=cfg_trick_value, attention=attention,
    )  # fmt: skip


def check_refiner_seed(refiner_seed: int) -> None:
    """RequestError unless it is a seed, or stands for the clip's own."""
    if refiner_seed != CLIPS_OWN:
        check_seed(refiner_seed)


def refine(
    model: Model,
    latent: ClipLatent,
    conditioning: Conditioning,
    refiner_seed: int = CLIPS_OWN,
    *,
    events: Events,
    **settings: Any,
) -> ClipLatent:
    """Refine the latents of a preview: twice the frames less one, 25 a second, at 1920x1088 or 1088x1920.

    The sound stays the preview's. The noise continues the clip's own (50 §9), or that of `refiner_seed`; `settings` are
    those of `refiner_settings`. RequestError before any worker hears of a bad request.
    """
    video, audio, meta = latent["video"], latent["audio"], latent["meta"]
    if "refined" in meta:
        raise RequestError("This latent has been refined already; connect the one of Magi2Sampler.")
    if not torch.isfinite(video).all() or not torch.isfinite(audio).all():
        raise RequestError("The latent holds NaN or infinite values, so there is nothing to refine.")
    chosen = refiner_settings(**settings, latent_size=(video.shape[3], video.shape[2]))
    seed = meta.get("seed", 0) if refiner_seed == CLIPS_OWN else refiner_seed
    check_seed(seed)
    request = {
        "seed": seed,
        "noise_device": meta.get("noise_device", NOISE_DEVICES[0]),
        "settings": asdict(chosen),
    }
    refined = manager.run(
        model,
        "refine",
        {
            "video": video,
            "audio": audio,
            "features": conditioning["features"],
            "null_features": conditioning["null_features"],
            **request,
        },
        events,
    )
    meta = {**meta, "width": chosen.width, "height": chosen.height, "fps": str(REFINED_FPS), "refined": request}
    return {"video": refined["video"].contiguous(), "audio": audio, "meta": meta}
