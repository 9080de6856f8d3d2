"""The server side of the stub: folders, interrupt flag, memory manager, progress bar, routes, messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class FolderPaths(ModuleType):
    """`folder_paths`: registered model folders and the four directories, below one base directory."""

    def __init__(self, base: Path) -> None:
        super().__init__("folder_paths")
        self.base = base
        self.models_dir = str(base / "models")
        self.folder_names_and_paths: dict[str, tuple[list[str], set[str]]] = {}
        for name in ("input", "output", "temp", "user", "models"):
            (base / name).mkdir(parents=True, exist_ok=True)

    def add_model_folder_path(self, folder_name: str, full_folder_path: str, is_default: bool = False) -> None:
        paths, _ = self.folder_names_and_paths.setdefault(folder_name, ([], set()))
        if full_folder_path not in paths:
            paths.insert(0, full_folder_path) if is_default else paths.append(full_folder_path)

    def get_folder_paths(self, folder_name: str) -> list[str]:
        return self.folder_names_and_paths[folder_name][0][:]

    def get_filename_list(self, folder_name: str) -> list[str]:
        paths, extensions = self.folder_names_and_paths[folder_name]
        found = set()
        for path in paths:
            for folder, _, files in os.walk(path, followlinks=True):
                names = (os.path.relpath(os.path.join(folder, name), path) for name in files)
                found |= {name for name in names if not extensions or os.path.splitext(name)[1] in extensions}
        return sorted(found)

    def get_output_directory(self) -> str:
        return str(self.base / "output")

    def get_input_directory(self) -> str:
        return str(self.base / "input")

    def get_temp_directory(self) -> str:
        return str(self.base / "temp")

    def get_user_directory(self) -> str:
        return str(self.base / "user")

    def get_save_image_path(
        self, filename_prefix: str, output_dir: str, image_width: int = 0, image_height: int = 0
    ) -> tuple[str, str, int, str, str]:
        relative = os.path.normpath(filename_prefix)
        folder = os.path.join(output_dir, os.path.dirname(relative))
        if os.path.commonpath((output_dir, os.path.abspath(folder))) != output_dir:
            raise Exception("Saving image outside the output folder is not allowed.")
        os.makedirs(folder, exist_ok=True)
        name = os.path.basename(relative)
        numbers = [0]
        for file in os.listdir(folder):
            digits = file.removeprefix(f"{name}_").split("_")[0]
            if file.startswith(f"{name}_") and digits.isdigit():
                numbers.append(int(digits))
        return folder, name, max(numbers) + 1, os.path.dirname(relative), filename_prefix


class ModelManagement(ModuleType):
    """`comfy.model_management`: the interrupt flag and the list of loaded models."""

    def __init__(self, interrupt_base: type[BaseException]) -> None:
        super().__init__("comfy.model_management")
        self.InterruptProcessingException = type("InterruptProcessingException", (interrupt_base,), {})
        self.interrupted = False
        self.current_loaded_models: list[Any] = []
        self.unloaded_all = 0

    def interrupt_current_processing(self, value: bool = True) -> None:
        self.interrupted = value

    def throw_exception_if_processing_interrupted(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise self.InterruptProcessingException()

    def get_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def soft_empty_cache(self, force: bool = False) -> None:
        pass

    def load_models_gpu(
        self,
        models: list[Any],
        memory_required: int = 0,
        force_patch_weights: bool = False,
        minimum_memory_required: int | None = None,
        force_full_load: bool = False,
    ) -> None:
        for model in models:
            model.model_patches_to(model.load_device)
            model.model_patches_to(model.model_dtype())
            model.partially_load(model.load_device, 1e32, force_patch_weights=force_patch_weights)
            self.current_loaded_models.insert(0, model)

    def free_memory(self, memory_required: float, device: torch.device, keep_loaded: Any = ()) -> list[Any]:
        """As 0.3.64: ask for part of the memory if that could be enough, else (or if it was not given) detach."""
        kept = []
        for model in self.current_loaded_models:
            if memory_required < model.loaded_size():
                freed = model.partially_unload(model.offload_device, memory_required)
                if freed >= memory_required:
                    kept.append(model)
                    continue
            model.detach(True)
        self.current_loaded_models = kept
        return []

    def unload_all_models(self) -> None:
        self.unloaded_all += 1
        self.free_memory(1e30, self.get_torch_device())


def make_model_patcher() -> type:
    class ModelPatcher:
        def __init__(
            self,
            model: torch.nn.Module,
            load_device: torch.device,
            offload_device: torch.device,
            size: int = 0,
            weight_inplace_update: bool = False,
        ) -> None:
            self.model, self.load_device, self.offload_device, self.size = model, load_device, offload_device, size

    return ModelPatcher


class PromptQueue:
    """The server's queue; `tasks` is how many workflows run or wait."""

    tasks = 0

    def get_tasks_remaining(self) -> int:
        return self.tasks


class PromptServerStub:
    """`PromptServer.instance`: remembers routes and everything sent to the page."""

    def __init__(self) -> None:
        self.routes = Routes()
        self.prompt_queue = PromptQueue()
        self.sent: list[tuple[str, Any]] = []
        self.texts: list[tuple[str, str]] = []
        self.progress: list[tuple[int, int, Any]] = []

    def send_sync(self, event: str, data: Any, sid: str | None = None) -> None:
        self.sent.append((event, data))

    def send_progress_text(self, text: str, node_id: str, sid: str | None = None) -> None:
        self.texts.append((node_id, text))


class Routes:
    def __init__(self) -> None:
        self.handlers: dict[tuple[str, str], Callable[..., Any]] = {}

    def _add(self, method: str, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            self.handlers[method, path] = handler
            return handler

        return register

    def get(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return self._add("GET", path)

    def post(self, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return self._add("POST", path)


def make_progress_bar(management: ModelManagement, server: PromptServerStub) -> type:
    class ProgressBar:
        """Every update also raises the interrupt exception if cancel was pressed (60 §4)."""

        def __init__(self, total: int, node_id: str | None = None) -> None:
            self.total, self.node_id = total, node_id

        def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
            management.throw_exception_if_processing_interrupted()
            self.total = total or self.total
            server.progress.append((value, self.total, preview))

    return ProgressBar
