"""`magi2 run`: execute an API workflow made of our nodes, LoadImage and SaveVideo, without any ComfyUI."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ..magi2_core.errors import RequestError, check_choice
from ..magi2_core.events import Events
from ..stages.caption import Captioned, make_caption
from ..stages.checkpoint import load_checkpoint
from ..stages.decode import decode
from ..stages.enhance import enhance_prompt
from ..stages.folders import Folders
from ..stages.latent import join_latent, load_latent, split_latent, write_latent
from ..stages.manager import manager
from ..stages.prompt import condition_on_picture, encode_prompt
from ..stages.refine import refine
from ..stages.sample import OPTION_FIELDS, sample, sampler_options
from ..stages.values import ClipLatent, DecodedClip
from .files import free_path, read_image, write_video
from .workflow import Workflow, is_link


@dataclass(frozen=True)
class Step:
    """How a node class runs: a function that takes its inputs by name, and its outputs from what that returns.

    A function that has parameters `events`, `folders` or `workflow` is given them. `extra` are names of inputs that the
    function takes without naming them. `ends` marks nodes that a run is for.
    """

    function: Callable[..., Any]
    outputs: Callable[[Any], tuple[Any, ...]] = lambda result: (result,)
    extra: tuple[str, ...] = ()
    ends: bool = False

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The inputs that the function names."""
        given = ("events", "folders", "workflow")
        return {
            name: parameter
            for name, parameter in inspect.signature(self.function).parameters.items()
            if name not in given and parameter.kind is not inspect.Parameter.VAR_KEYWORD
        }


def save_latent(
    magi2_latent: ClipLatent, filename_prefix: str = "magi2/latent", *, folders: Folders, workflow: Workflow
) -> Path:
    """Write a latent below the output folder, numbered as ComfyUI does."""
    path = free_path(filename_prefix, ".safetensors", folders.output)
    write_latent(magi2_latent, path, {"prompt": workflow})
    return path


def save_video(
    video: DecodedClip, filename_prefix: str = "video/magi2", format: str = "auto", codec: str = "auto", *,
    folders: Folders,
) -> Path:  # fmt: skip
    """Write an mp4 below the output folder, numbered as ComfyUI does."""
    check_choice("format", format, ("auto", "mp4"))
    check_choice("codec", codec, ("auto", "h264"))
    if not isinstance(video, DecodedClip) or video.frames is video.file is None:
        raise RequestError("SaveVideo needs the video output of Magi2Decode, decoded with its picture.")
    path = free_path(filename_prefix, ".mp4", folders.output)
    write_video(video, path)
    return path


def load_image(image: str, upload: str = "image", *, folders: Folders) -> Tensor:
    """A picture of the input folder as IMAGE [1, H, W, 3]."""
    return read_image(image, folders)


def unload_workers(what: str = "workers", after: Any = None) -> Any:
    """Free what the workers hold; `after` passes through."""
    check_choice("what", what, ("weights", "workers"))
    manager.stop() if what == "workers" else manager.unload()
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
    "Magi2LoadCheckpoint": Step(load_checkpoint, lambda model: (model, model.plan.describe())),
    "Magi2EnhancePrompt": Step(enhance_prompt, lambda made: (made.prompt, made.caption_json or made.prompt)),
    "Magi2Caption": Step(make_caption, caption_outputs),
    "Magi2EncodePrompt": Step(encode_prompt),
    "Magi2ImageConditioning": Step(condition_on_picture),
    "Magi2SamplerOptions": Step(sampler_options, extra=tuple(field.name for field in OPTION_FIELDS)),
    "Magi2Sampler": Step(sample),
    "Magi2Refine": Step(refine),
    "Magi2Decode": Step(decode, lambda clip: (clip.frames, clip.waveform, clip, float(clip.fps))),
    "Magi2SplitLatent": Step(split_latent),
    "Magi2JoinLatent": Step(join_latent),
    "Magi2LoadLatent": Step(load_latent),
    "Magi2SaveLatent": Step(save_latent, lambda path: (), ends=True),
    "Magi2UnloadWorkers": Step(unload_workers, ends=True),
    "LoadImage": Step(load_image, lambda image: (image, None)),
    "SaveVideo": Step(save_video, lambda path: (), ends=True),
}


@dataclass
class _Run:
    workflow: Workflow
    folders: Folders
    events: Events
    results: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    written: list[Path] = field(default_factory=list)


def check_workflow(workflow: Workflow) -> list[str]:
    """The ids of the nodes to run for, after refusing everything that can be refused before work begins.

    Raises RequestError for unknown nodes (all of them, by name), unknown or missing inputs, links that lead nowhere or
    in a circle, and a workflow that saves nothing.
    """
    unknown = sorted({node["class_type"] for node in workflow.values()} - set(STEPS))
    if unknown:
        raise RequestError(
            f"`magi2 run` does not know {', '.join(unknown)}. It runs {', '.join(sorted(STEPS))}; queue other nodes on"
            " a ComfyUI server with `magi2 queue`."
        )
    for node_id, node in workflow.items():
        _check_inputs(node_id, node, workflow)
    for node_id in workflow:
        _check_circle(node_id, workflow, ())
    ends = [node_id for node_id, node in workflow.items() if STEPS[node["class_type"]].ends]
    if not ends:
        raise RequestError("The workflow saves nothing; add a SaveVideo or Magi2SaveLatent node.")
    return ends


def _check_inputs(node_id: str, node: dict[str, Any], workflow: Workflow) -> None:
    step, name = STEPS[node["class_type"]], f"{node['class_type']} (node {node_id})"
    parameters = step.parameters()
    strange = sorted(set(node["inputs"]) - set(parameters) - set(step.extra))
    if strange:
        raise RequestError(f"{name} has no input {', '.join(strange)}; it has {', '.join([*parameters, *step.extra])}.")
    missing = [
        key for key, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and key not in node["inputs"]
    ]  # fmt: skip
    if missing:
        raise RequestError(f"{name} lacks its input {', '.join(missing)}.")
    for key, value in node["inputs"].items():
        if is_link(value) and value[0] not in workflow:
            raise RequestError(f"{key} of {name} is linked to node {value[0]}, which is not in the workflow.")


def _check_circle(node_id: str, workflow: Workflow, above: tuple[str, ...]) -> None:
    if node_id in above:
        raise RequestError(f"The links of the workflow run in a circle: {' -> '.join([*above, node_id])}.")
    for value in workflow[node_id]["inputs"].values():
        if is_link(value):
            _check_circle(value[0], workflow, (*above, node_id))


def run_workflow(workflow: Workflow, folders: Folders, events: Events) -> list[Path]:
    """Run a workflow to its end and return the files that it wrote. Workers end with it, whatever happens."""
    ends = check_workflow(workflow)
    folders.output.mkdir(parents=True, exist_ok=True)
    # beside the results, so that a clip that was decoded into a file is moved to its name in one step
    with TemporaryDirectory(prefix=".magi2-", dir=folders.output) as temp:
        run = _Run(workflow, replace(folders, temp=Path(temp)), events)
        try:
            for node_id in ends:
                _execute(node_id, run)
        finally:
            manager.stop()
    return run.written


def _execute(node_id: str, run: _Run) -> tuple[Any, ...]:
    if node_id not in run.results:
        node = run.workflow[node_id]
        step = STEPS[node["class_type"]]
        inputs = {name: _value(value, node_id, name, run) for name, value in node["inputs"].items()}
        run.events.check()
        given = {"events": run.events, "folders": run.folders, "workflow": run.workflow}
        wanted = inspect.signature(step.function).parameters
        function = partial(step.function, **{name: value for name, value in given.items() if name in wanted})
        result = function(**inputs)
        if isinstance(result, Path):
            run.written.append(result)
        run.results[node_id] = step.outputs(result)
    return run.results[node_id]


def _value(value: Any, node_id: str, name: str, run: _Run) -> Any:
    if not is_link(value):
        return value
    outputs = _execute(value[0], run)
    if not 0 <= value[1] < len(outputs):
        source = run.workflow[value[0]]["class_type"]
        raise RequestError(f"{name} of node {node_id} is linked to output {value[1]} of {source}, which it has not.")
    return outputs[value[1]]
