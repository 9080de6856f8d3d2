"""Conditioning to latents: the preview stage (20)."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from ..magi2_core.errors import RequestError, check_choice
from ..magi2_core.events import Events
from ..magi2_core.sampling.denoise import SamplingSettings
from ..magi2_core.sampling.geometry import (
    ORIENTATIONS,
    PREVIEW_FPS,
    TIERS,
    check_size,
    orient,
    reference_size,
    tier,
)
from ..magi2_core.sampling.guidance import GuidanceSettings
from ..magi2_core.sampling.noise import NOISE_DEVICES, check_seed
from .manager import manager
from .values import ClipLatent, Conditioning, Model, SamplerOptions

DEFAULTS = SamplingSettings()
# The refiner's tier is not offered here: what it refines is made at 540p (20 §1.1).
RESOLUTIONS = tuple(name for name, each in TIERS.items() if each.refined is None)
OPTION_FIELDS = tuple(
    field
    for field in fields(GuidanceSettings)
    if field.name not in ("video_txt_guidance_scale", "audio_txt_guidance_scale", "use_negative_prompt")
)
LARGEST_SIDE = 2048


def sampler_options(
    width: int = 0, height: int = 0, noise_device: str = NOISE_DEVICES[0], **guidance: Any
) -> SamplerOptions:
    """The settings that are seldom touched; `guidance` takes the fields of GuidanceSettings. RequestError if bad."""
    check_choice("noise_device", noise_device, NOISE_DEVICES)
    if (width == 0) != (height == 0):
        raise RequestError(f"The size is {width}x{height}; give both sides, or 0 for both to use the resolution's own.")
    if width and height:
        check_size(width, height)
        if max(width, height) > LARGEST_SIDE:
            raise RequestError(f"The size is {width}x{height}; both sides must be at most {LARGEST_SIDE}.")
    GuidanceSettings(**guidance)
    return {"width": width, "height": height, "noise_device": noise_device, "guidance": guidance}


def clip_size(resolution: str, orientation: str, options: SamplerOptions | None) -> tuple[int, int]:
    """(width, height) in pixels that the sampler generates."""
    check_choice("resolution", resolution, RESOLUTIONS)
    check_choice("orientation", orientation, ORIENTATIONS)
    if options is not None and options["width"]:
        return options["width"], options["height"]
    return orient(tier(resolution).preview, orientation)


def sampling_settings(
    steps: int, shift: float, video_guidance: float, audio_guidance: float, options: SamplerOptions | None
) -> SamplingSettings:
    """The settings of the loop; RequestError if any of them cannot be used."""
    guidance = GuidanceSettings(
        video_txt_guidance_scale=video_guidance,
        audio_txt_guidance_scale=audio_guidance,
        **(options["guidance"] if options is not None else {}),
    )
    return SamplingSettings(steps, shift, guidance)


def sample(
    model: Model,
    conditioning: Conditioning,
    resolution: str = RESOLUTIONS[-1],
    orientation: str = ORIENTATIONS[0],
    seed: int = 42,
    steps: int = DEFAULTS.steps,
    video_guidance: float = DEFAULTS.guidance.video_txt_guidance_scale,
    audio_guidance: float = DEFAULTS.guidance.audio_txt_guidance_scale,
    shift: float = DEFAULTS.shift,
    options: SamplerOptions | None = None,
    *,
    events: Events,
) -> ClipLatent:
    """Generate the latents of a ten-second clip. Raises RequestError before any worker hears of a bad request."""
    check_seed(seed)
    width, height = clip_size(resolution, orientation, options)
    settings = sampling_settings(steps, shift, video_guidance, audio_guidance, options)
    pictures = conditioning["pictures"]
    if len(pictures) != len(conditioning["figures"]):
        raise RequestError(
            "The prompt was encoded for a picture, but no picture arrived; connect Magi2ImageConditioning between"
            " Magi2EncodePrompt and the sampler, or turn for_picture off."
        )
    for picture in pictures:
        used = reference_size(picture.shape[1], picture.shape[0], width, height)
        events.log(f"The picture is used at {used[0]}x{used[1]}.")
    images = None
    if pictures:
        images = manager.run(
            model, "encode_image", {"pictures": pictures, "width": width, "height": height}, events
        )["latents"]
    noise_device = options["noise_device"] if options is not None else NOISE_DEVICES[0]
    request = {
        "width": width,
        "height": height,
        "seed": seed,
        "steps": settings.steps,
        "shift": settings.shift,
        "guidance": asdict(settings.guidance),
        "noise_device": noise_device,
    }
    tensors = {key: conditioning[key] for key in ("features", "null_features", "markers")}
    latent = manager.run(model, "sample", {**tensors, "image_latents": images, **request}, events)
    meta = {
        **request,
        "checkpoint": model.name,
        "dtype": model.plan.dtype,
        "prompt": conditioning["prompt"],
        "negative_prompt": conditioning["negative_prompt"],
        "pictures": len(pictures),
        "fps": str(PREVIEW_FPS),
    }
    return {"video": latent["video"].contiguous(), "audio": latent["audio"].contiguous(), "meta": meta}
