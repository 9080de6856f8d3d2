"""Everything that the pack takes from ComfyUI, and nothing else does (60 §14). Works with 0.3.64 and newer.

The allowed surface: `comfy_api.latest`, `comfy.utils.ProgressBar`, the interrupt and unload functions of
`comfy.model_management`, `folder_paths`, `server.PromptServer`, and two optional things that are looked up when they
are used: the Wan 2.2 colour factors for previews, and `ModelPatcher` for handing memory back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

try:
    from comfy_api.latest import ComfyExtension, InputImpl, Types, io, ui
except ImportError as error:
    raise ImportError(
        "MAGI-2 Native needs ComfyUI >= 0.3.64: this one has no comfy_api.latest with V3 nodes. Update ComfyUI."
    ) from error

import comfy.model_management as model_management
import folder_paths
from comfy.utils import ProgressBar
from server import PromptServer

from ..stages.folders import Folders, checkpoint_names

__all__ = ["ComfyExtension", "InputImpl", "ProgressBar", "Types", "io", "model_management", "ui"]

MODEL_FOLDER = "magi2"

ModelType = io.Custom("MAGI2_MODEL")
ConditioningType = io.Custom("MAGI2_CONDITIONING")
LatentType = io.Custom("MAGI2_LATENT")
OptionsType = io.Custom("MAGI2_SAMPLER_OPTIONS")


def schema(**arguments: Any) -> Any:
    """A Schema from the arguments that this ComfyUI knows; newer ones are dropped by an older version (60 §2)."""
    known = {field.name for field in fields(io.Schema)}
    return io.Schema(**{key: value for key, value in arguments.items() if key in known})


def advanced(make: Callable[..., Any], *positional: Any, **arguments: Any) -> Any:
    """An input that a newer page folds away under 'advanced'; a plain one where ComfyUI does not know that (60 §2)."""
    if "advanced" in inspect.signature(make).parameters:
        arguments["advanced"] = True
    return make(*positional, **arguments)


def register_model_folder() -> None:
    """Make models/magi2 known, next to what extra_model_paths.yaml may have set already (60 §7)."""
    folder_paths.add_model_folder_path(MODEL_FOLDER, str(Path(folder_paths.models_dir) / MODEL_FOLDER))
    paths, extensions = folder_paths.folder_names_and_paths[MODEL_FOLDER]
    if not extensions:
        folder_paths.folder_names_and_paths[MODEL_FOLDER] = (paths, {".safetensors", ".json"})


def checkpoints() -> list[str]:
    """Names of the checkpoints in the registered folders; ComfyUI caches the listing, so this is quick."""
    return checkpoint_names(folder_paths.get_filename_list(MODEL_FOLDER))


def folders() -> Folders:
    """The folders of this server, asked for each time: the user may have moved them."""
    return Folders(
        checkpoints=tuple(Path(path) for path in folder_paths.get_folder_paths(MODEL_FOLDER)),
        output=Path(folder_paths.get_output_directory()),
        input=Path(folder_paths.get_input_directory()),
        user=user_folder(),
        temp=Path(folder_paths.get_temp_directory()),
    )


def server_folders() -> list[Path]:
    """All folders of this server, inner ones first."""
    found = folders()
    known = {*found.checkpoints, found.output, found.input, found.temp, found.user, *map(Path, comfyui_root())}
    return sorted((path for path in known if path and path.name), key=lambda path: len(path.parts), reverse=True)


def user_folder() -> Path:
    """Where the user may put own texts for the pack, such as negative_prompt.txt."""
    return Path(folder_paths.get_user_directory()) / MODEL_FOLDER


def comfyui_root() -> tuple[str, ...]:
    """ComfyUI's own folder, whose modules workers must never see (60 §6.4)."""
    file = getattr(folder_paths, "__file__", None)
    return (str(Path(file).parent),) if file else ()


def save_path(prefix: str, suffix: str) -> tuple[Path, str]:
    """A free file name below the output folder, and its subfolder; ComfyUI refuses prefixes that leave it."""
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        prefix.replace("\\", "/"), folder_paths.get_output_directory()
    )
    return Path(folder) / f"{name}_{counter:05}_{suffix}", subfolder


def video_file(path: Path) -> Any:
    """A VIDEO that is a file: Save Video copies its streams, so its frames are never in memory together."""
    return InputImpl.VideoFromFile(str(path))


def missing_output(reason: str | None = None) -> Any:
    """Fills an output that was not made: nodes that are connected to it do not run, and `reason` is shown there."""
    try:
        from comfy_execution.graph_utils import ExecutionBlocker
    except ImportError:
        return None
    return ExecutionBlocker(reason)


def interrupted_check() -> None:
    """Raise ComfyUI's interrupt exception if the user pressed cancel; nobody here may catch it (60 §4)."""
    model_management.throw_exception_if_processing_interrupted()


def server() -> Any:
    """The running server, or None in tests."""
    return getattr(PromptServer, "instance", None)


def workflows_left() -> int:
    """How many workflows run or wait on this server."""
    return server().prompt_queue.get_tasks_remaining() if server() is not None else 0


def send(event: str, data: dict[str, Any]) -> None:
    """Send an event to every open page; without a server or a page it does nothing."""
    if server() is not None:
        server().send_sync(event, data)


def show_text(text: str, node_id: str | None) -> None:
    """Show a line of text in a node."""
    if server() is not None and node_id is not None:
        server().send_progress_text(text, node_id)


def wan_colours() -> tuple[Sequence[Sequence[float]], Sequence[float]] | None:
    """ComfyUI's linear map from Wan 2.2 latents to colours, where it has one."""
    try:
        from comfy.latent_formats import Wan22

        return Wan22.latent_rgb_factors, Wan22.latent_rgb_factors_bias
    except (ImportError, AttributeError):
        return None
