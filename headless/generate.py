"""`magi2 generate`: from a prompt, and perhaps pictures, to an mp4 file with stereo sound."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..magi2_core.checkpoint.inspect import require
from ..magi2_core.codecs.media import DEFAULT_CRF, check_output_path, check_video, read_back
from ..magi2_core.codecs.picture import read_picture
from ..magi2_core.conditioning.markers import check_equal_sizes, marker
from ..magi2_core.conditioning.negative import default_negative_prompt
from ..magi2_core.events import Events
from ..magi2_core.memory.plan import Plan
from ..magi2_core.refiner.stage import RefinerSettings
from ..magi2_core.sampling.denoise import SamplingSettings
from ..magi2_core.sampling.geometry import PREVIEW_FPS, REFINED_FPS, orient, reference_size, tier
from ..magi2_core.sampling.noise import check_noise_device, check_seed
from ..stages.prompt import check_picture_count, check_prompt
from .session import Session


@dataclass(frozen=True)
class ClipRequest:
    """Everything that decides a clip, and where it goes.

    images: pictures by figure number, in the order in which they enter the sequence. refiner: used for 1080p alone; its
    width and height follow from the orientation. output_size: (width, height) that the finished frames are rescaled to.
    """

    prompt: str
    output: Path
    negative_prompt: str = field(default_factory=default_negative_prompt)
    images: Mapping[int, Path] = field(default_factory=dict)
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


@dataclass(frozen=True)
class Checked:
    """What a request comes to: the size that is generated, the refined one or None, its pictures, and its file."""

    size: tuple[int, int]
    refined: tuple[int, int] | None
    pictures: list[Tensor]
    output: Path


def check_request(request: ClipRequest, plan: Plan) -> Checked:
    """Find everything that can be found before workers start and weights are read.

    Raises RequestError for a prompt that cannot be encoded, a bad seed, size or picture, or an output that
    cannot be written, and CheckpointError if the checkpoint lacks a part that the request takes, or it is damaged.
    """
    check_prompt(request.prompt, request.negative_prompt)
    check_picture_count(len(request.images))
    check_seed(request.seed)
    check_noise_device(request.noise_device, "cpu" if "cpu" in plan.devices else "cuda")
    chosen = tier(request.resolution)
    size, refined = (each and orient(each, request.orientation) for each in (chosen.preview, chosen.refined))
    assert size is not None
    check_video(*(request.output_size or refined or size), request.crf)
    output = check_output_path(request.output)
    pictures = [torch.from_numpy(np.array(read_picture(path))) for path in request.images.values()]
    sizes = [reference_size(picture.shape[1], picture.shape[0], *size) for picture in pictures]
    check_equal_sizes({marker(figure): each for figure, each in zip(request.images, sizes, strict=True)})
    takes = {"I2VA": bool(pictures), "1080p": refined is not None}
    require(plan.checkpoint, ["T2VA", *(name for name, needed in takes.items() if needed)])
    return Checked(size, refined, pictures, output)


def generate(request: ClipRequest, session: Session, events: Events) -> Clip:
    """Make one clip. Raises as `check_request` before the work; nothing is left under the final name if it fails or is
    cancelled.
    """
    checked = check_request(request, session.plan)
    width, height = checked.size
    seconds: dict[str, float] = {}

    def run(call: str, **arguments: Any) -> dict[str, Any]:
        started = time.monotonic()
        result = session.run(call, arguments, events)
        seconds[call] = round(time.monotonic() - started, 3)
        return result

    text = run("encode_text", prompt=request.prompt, negative_prompt=request.negative_prompt,
               figures=list(request.images))
    features = {name: text[name] for name in ("features", "null_features")}
    noise = {"seed": request.seed, "noise_device": request.noise_device}
    images = None
    if checked.pictures:
        images = run("encode_image", pictures=checked.pictures, width=width, height=height)["latents"]
    latent = run("sample", **features, markers=text["markers"], image_latents=images, width=width, height=height,
                 **noise, **asdict(request.settings))
    sound = run("decode_audio", audio=latent["audio"])
    video, fps = latent["video"], PREVIEW_FPS
    if checked.refined is not None:
        target = dict(zip(("width", "height"), checked.refined, strict=True))
        video = run("refine", video=video, audio=latent["audio"], **features, **noise,
                    settings={**asdict(request.refiner), **target})["video"]
        fps = REFINED_FPS
    run("write_clip", video=video, waveform=sound["waveform"], sample_rate=sound["sample_rate"],
        path=str(checked.output), crf=request.crf, fps=str(fps), size=request.output_size)
    facts = read_back(checked.output)
    return Clip(checked.output, facts.frames, facts.width, facts.height, str(facts.frame_rate), facts.samples,
                facts.sample_rate, request.seed, text["tokens"], text["truncated"], tuple(text["warnings"]), seconds)
