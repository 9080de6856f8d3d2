"""`magi2 generate`: from a prompt, and perhaps pictures, to an mp4 file with stereo sound."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..magi2_core.codecs.media import DEFAULT_CRF, check_output_path, read_back
from ..magi2_core.codecs.picture import read_picture
from ..magi2_core.conditioning.negative import default_negative_prompt
from ..magi2_core.errors import RequestError
from ..magi2_core.events import Events
from ..magi2_core.refiner.stage import RefinerSettings
from ..magi2_core.sampling.denoise import SamplingSettings
from ..magi2_core.sampling.geometry import PREVIEW_FPS, orient, reference_size, tier
from ..magi2_core.sampling.noise import check_seed
from .session import Session


@dataclass(frozen=True)
class ClipRequest:
    """Everything that decides a clip, and where it goes.

    refiner: used for 1080p alone; its width and height follow from the orientation. output_size: (width, height) that
    the finished frames are rescaled to.
    """

    prompt: str
    output: Path
    negative_prompt: str | None = None
    images: Sequence[Path] = ()
    resolution: str = "540p"
    orientation: str = "landscape"
    seed: int = 42
    noise_device: str = "cpu"
    settings: SamplingSettings = field(default_factory=SamplingSettings)
    refiner: RefinerSettings = field(default_factory=RefinerSettings)
    output_size: tuple[int, int] | None = None
    crf: int = DEFAULT_CRF


@dataclass(frozen=True)
class Clip:
    """What was made: the file, its exact counts, and how long each stage took."""

    path: Path
    frames: int
    width: int
    height: int
    fps: str
    samples: int
    sample_rate: int
    seed: int
    prompt_tokens: int
    truncated: bool
    warnings: tuple[str, ...]
    seconds: dict[str, float]


def check_request(request: ClipRequest) -> tuple[int, int]:
    """Find everything that can be found before any weight is read; return the generated width and height.

    Raises RequestError for an empty prompt, a bad seed, size or picture, or an output path that cannot be written.
    """
    if not request.prompt.strip():
        raise RequestError("The prompt is empty; describe what the clip should show and sound like.")
    check_seed(request.seed)
    width, height = orient(tier(request.resolution).preview, request.orientation)
    if request.output_size is not None and (min(request.output_size) < 2 or any(s % 2 for s in request.output_size)):
        raise RequestError(f"The output size is {request.output_size}; both sides must be even and at least 2.")
    check_output_path(request.output)
    return width, height


def generate(request: ClipRequest, session: Session, events: Events) -> Clip:
    """Make one clip. Nothing is left under the final name if it fails or is cancelled."""
    width, height = check_request(request)
    pictures = [_pixels(path) for path in request.images]
    for picture in pictures:
        reference_size(picture.shape[1], picture.shape[0], width, height)
    seconds: dict[str, float] = {}

    def run(call: str, **arguments: Any) -> dict[str, Any]:
        started = time.monotonic()
        result = session.run(call, arguments, events)
        seconds[call] = round(time.monotonic() - started, 3)
        return result

    negative = default_negative_prompt() if request.negative_prompt is None else request.negative_prompt
    text = run("encode_text", prompt=request.prompt, negative_prompt=negative,
               figures=list(range(1, len(pictures) + 1)))
    for warning in text["warnings"]:
        events.log(warning)
    images = run("encode_image", pictures=pictures, width=width, height=height)["latents"] if pictures else None
    latent = run("sample", features=text["features"], null_features=text["null_features"], markers=text["markers"],
                 image_latents=images, width=width, height=height, seed=request.seed,
                 noise_device=request.noise_device, steps=request.settings.steps, shift=request.settings.shift,
                 guidance=asdict(request.settings.guidance))
    sound = run("decode_audio", audio=latent["audio"])
    video, fps = latent["video"], Fraction(PREVIEW_FPS)
    if (refined := tier(request.resolution).refined) is not None:
        target = dict(zip(("width", "height"), orient(refined, request.orientation), strict=True))
        video = run("refine", video=video, audio=latent["audio"], features=text["features"],
                    null_features=text["null_features"], seed=request.seed, noise_device=request.noise_device,
                    settings={**asdict(request.refiner), **target})["video"]
        fps = 2 * fps
    run("write_clip", video=video, waveform=sound["waveform"], sample_rate=sound["sample_rate"],
               path=str(request.output.absolute()), crf=request.crf, fps=str(fps),
        size=request.output_size)
    facts = read_back(request.output)
    return Clip(request.output, facts.frames, facts.width, facts.height, str(facts.frame_rate), facts.samples,
                facts.sample_rate, request.seed, text["tokens"], text["truncated"], tuple(text["warnings"]), seconds)


def _pixels(path: Path) -> Tensor:
    return torch.from_numpy(np.array(read_picture(path)))
