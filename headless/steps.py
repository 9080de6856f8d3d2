"""What `magi2 run` can run: our nodes, LoadImage and SaveVideo, each a plain function with typed inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ..magi2_core.errors import RequestError
from ..magi2_core.sampling.guidance import GuidanceSettings
from ..magi2_core.sampling.noise import check_seed
from ..stages.caption import Captioned, make_caption
from ..stages.checkpoint import check_refiner, load_checkpoint
from ..stages.decode import MAKE_FRAMES, PARTS, check_output_size, decode
from ..stages.enhance import ON_FAILURE, check_variation, enhance_prompt
from ..stages.folders import Folders, check_prefix
from ..stages.latent import join_latent, load_latent, split_latent, write_latent
from ..stages.prompt import check_picture_to_come, check_prompt, condition_on_picture, encode_prompt
from ..stages.refine import check_refiner_seed, refine, refiner_settings
from ..stages.sample import OPTION_FIELDS, clip_size, sample, sampler_options, sampling_settings
from ..stages.unload import WHAT, free
from ..stages.values import ClipLatent, DecodedClip
from .files import new_file, read_image, write_video
from .workflow import Workflow

# Types of the graph (60 §3) by the annotations of the functions.
TYPES = {
    "Model": "MAGI2_MODEL", "Conditioning": "MAGI2_CONDITIONING", "ClipLatent": "MAGI2_LATENT",
    "SamplerOptions": "MAGI2_SAMPLER_OPTIONS", "Tensor": "IMAGE", "dict[str, Tensor]": "LATENT",
    "DecodedClip": "VIDEO", "str": "STRING", "int": "INT", "float": "FLOAT", "bool": "BOOLEAN", "None": "NONE",
    "Any": "*",
}  # fmt: skip
GIVEN = ("events", "folders", "workflow")


@dataclass(frozen=True)
class Input:
    """An input of a node: the types that it takes, and the value that it has without one, `inspect.Parameter.empty` if
    it needs one."""

    types: frozenset[str]
    default: Any


@dataclass(frozen=True)
class Step:
    """How a node class runs: a function that takes the node's inputs by name, and `events`, `folders` and `workflow`
    where it has such parameters.

    outputs: their types; the one that the function returns, if left out. split: the outputs from what it returns.
    more: parameters of another function that it takes as inputs without naming them. choices: what some inputs are
    chosen from. early: it needs no workers, and runs before all that do. checks: called before workers start, with
    those inputs that they name, if these are known by then. ends: a run is for nodes of this kind.
    """

    function: Callable[..., Any]
    outputs: tuple[str, ...] | None = None
    split: Callable[[Any], tuple[Any, ...]] = lambda result: (result,)
    more: tuple[inspect.Parameter, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    early: bool = False
    checks: tuple[Callable[..., Any], ...] = ()
    ends: bool = False

    def inputs(self) -> dict[str, Input]:
        """The inputs by name."""
        parameters = (*inspect.signature(self.function).parameters.values(), *self.more)
        named = [each for each in parameters if each.name not in GIVEN and each.kind is not each.VAR_KEYWORD]
        return {each.name: Input(_types(each.annotation), each.default) for each in named}

    def output_types(self) -> tuple[str, ...]:
        """The types of the outputs, in their order."""
        if self.outputs is None:
            return (TYPES[inspect.signature(self.function).return_annotation],)
        return self.outputs


def _types(annotation: str) -> frozenset[str]:
    return frozenset(TYPES[part] for part in annotation.split(" | "))


def parameters_of(function: Callable[..., Any], names: Collection[str] | None = None) -> tuple[inspect.Parameter, ...]:
    """Its parameters that may be given by place, or those of them that are named."""
    found = inspect.signature(function).parameters.values()
    return tuple(each for each in found if each.kind is not each.KEYWORD_ONLY and (names is None or each.name in names))


def save_latent(
    magi2_latent: ClipLatent, filename_prefix: str = "magi2/latent", *, folders: Folders, workflow: Workflow
) -> Path:
    """Write a latent below the output folder, numbered as ComfyUI does."""
    with new_file(filename_prefix, ".safetensors", folders.output) as path:
        write_latent(magi2_latent, path, {"prompt": workflow})
    return path


def save_video(
    video: DecodedClip, filename_prefix: str = "video/magi2", format: str = "auto", codec: str = "auto", *,
    folders: Folders,
) -> Path:  # fmt: skip
    """Write an mp4 below the output folder, numbered as ComfyUI does."""
    with new_file(filename_prefix, ".mp4", folders.output) as path:
        write_video(video, path)
    return path


def load_image(image: str, upload: str = "image", *, folders: Folders) -> Tensor:
    """A picture of the input folder as IMAGE [1, H, W, 3]."""
    return read_image(image, folders)


def unload_workers(what: str = "workers", after: Any = None) -> Any:
    """Free what the workers hold; `after` passes through."""
    free(what)
    return after


def caption_outputs(made: Captioned) -> tuple[str, str]:
    """The outputs of Magi2Caption; RequestError if it waits for somebody to edit the caption."""
    if made.stopped:
        raise RequestError(
            "Magi2Caption waits for its caption to be edited (stop_to_edit is on). Turn that off, or give it as"
            f" edited_caption; it is:\n{made.caption}"
        )
    return made.prompt, made.caption


STEPS: dict[str, Step] = {
    "Magi2LoadCheckpoint": Step(
        load_checkpoint, ("MAGI2_MODEL", "STRING"), lambda model: (model, model.plan.describe()), early=True
    ),
    "Magi2EnhancePrompt": Step(
        enhance_prompt, ("STRING", "STRING"), lambda made: (made.prompt, made.caption_json or made.prompt),
        choices={"on_failure": ON_FAILURE}, checks=(check_variation,),
    ),
    "Magi2Caption": Step(make_caption, ("STRING", "STRING"), caption_outputs),
    "Magi2EncodePrompt": Step(encode_prompt, checks=(check_prompt, check_picture_to_come)),
    "Magi2ImageConditioning": Step(condition_on_picture),
    "Magi2SamplerOptions": Step(
        sampler_options, more=parameters_of(GuidanceSettings, [each.name for each in OPTION_FIELDS]), early=True
    ),
    "Magi2Sampler": Step(sample, checks=(check_seed, clip_size, sampling_settings)),
    "Magi2Refine": Step(
        refine, more=parameters_of(refiner_settings), checks=(check_refiner, refiner_settings, check_refiner_seed)
    ),
    "Magi2Decode": Step(
        decode, ("IMAGE", "AUDIO", "VIDEO", "FLOAT"),
        lambda clip: (clip.frames, clip.waveform, clip if clip.count else None, float(clip.fps)),
        choices={"parts": PARTS, "make_frames": MAKE_FRAMES}, checks=(check_output_size,),
    ),
    "Magi2SplitLatent": Step(split_latent),
    "Magi2JoinLatent": Step(join_latent),
    "Magi2LoadLatent": Step(load_latent, early=True),
    "Magi2SaveLatent": Step(save_latent, (), lambda path: (), checks=(check_prefix,), ends=True),
    "Magi2UnloadWorkers": Step(unload_workers, choices={"what": WHAT}, ends=True),
    "LoadImage": Step(load_image, ("IMAGE", "MASK"), lambda image: (image, None), early=True),
    "SaveVideo": Step(
        save_video, (), lambda path: (), choices={"format": ("auto", "mp4"), "codec": ("auto", "h264")},
        checks=(check_prefix,), ends=True,
    ),
}
