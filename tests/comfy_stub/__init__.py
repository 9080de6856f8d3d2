"""A small stand-in for the parts of ComfyUI 0.3.64 that the pack may touch (60 §13, layer 2).

`installed()` puts it into `sys.modules`, `load_pack()` loads the repository the way ComfyUI loads a custom node pack.
Where a real checkout is present, `test_comfy_stub.py` compares every signature below with the real one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from . import io_types
from .host import FolderPaths, ModelManagement, PromptServerStub, make_model_patcher, make_progress_bar

PACK = Path(__file__).resolve().parents[2]


@dataclass
class Stub:
    """What a test can look at and set: folders, interrupt flag, progress received, messages sent to the page."""

    folder_paths: FolderPaths
    model_management: ModelManagement
    server: PromptServerStub
    pack: ModuleType | None = None

    def nodes(self) -> dict[str, Any]:
        """Load the pack if needed and return its node classes by id, checked as ComfyUI checks them."""
        if self.pack is None:
            self.pack = load_pack()
        return node_classes(self.pack)

    def module(self, name: str) -> ModuleType:
        """A module of the loaded pack, for instance `stages.manager`."""
        assert self.pack is not None, "load the pack first"
        return sys.modules[f"{self.pack.__name__}.{name}"]


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


@contextlib.contextmanager
def installed(base: Path, *, interrupt_base: type[BaseException] = Exception) -> Iterator[Stub]:
    """Make `import comfy`, `comfy_api.latest`, `folder_paths` and `server` find the stub; undo it afterwards.

    `interrupt_base` is Exception in ComfyUI 0.3.64 and BaseException in newer versions (60 §4).
    """
    folders, management, server = FolderPaths(base), ModelManagement(interrupt_base), PromptServerStub()
    progress_bar = make_progress_bar(management, server)
    latest = _module(
        "comfy_api.latest",
        io=io_types.io,
        ui=io_types.ui,
        ComfyExtension=io_types.ComfyExtension,
        InputImpl=SimpleNamespace(
            VideoFromComponents=io_types.VideoFromComponents, VideoFromFile=io_types.VideoFromFile
        ),
        Types=SimpleNamespace(VideoComponents=io_types.VideoComponents),
    )
    utils = _module("comfy.utils", ProgressBar=progress_bar)
    patcher = _module("comfy.model_patcher", ModelPatcher=make_model_patcher())
    comfy = _module("comfy", utils=utils, model_management=management, model_patcher=patcher, __path__=[])
    modules = {
        "comfy_api": _module("comfy_api", latest=latest, __path__=[]),
        "comfy_api.latest": latest,
        "comfy": comfy,
        "comfy.utils": utils,
        "comfy.model_management": management,
        "comfy.model_patcher": patcher,
        "folder_paths": folders,
        "server": _module("server", PromptServer=types.SimpleNamespace(instance=server)),
    }
    before = {name: sys.modules.get(name) for name in modules}
    known = set(sys.modules)
    sys.modules.update(modules)
    try:
        yield Stub(folders, management, server)
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
        for name in set(sys.modules) - known:
            if name.startswith(_pack_name()):
                del sys.modules[name]


def _pack_name() -> str:
    # ComfyUI names a pack's module after its folder, with every dot replaced (60 §1).
    return "/stub/custom_nodes/magi2-native"


def load_pack() -> ModuleType:
    """Load the repository under the path-like module name that ComfyUI gives it; only relative imports work there."""
    name = _pack_name()
    spec = importlib.util.spec_from_file_location(
        name, PACK / "__init__.py", submodule_search_locations=[str(PACK)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def node_classes(pack: ModuleType) -> dict[str, Any]:
    """Run the pack's entry point as ComfyUI does: `comfy_entrypoint`, `get_node_list`, then each schema."""
    import asyncio

    async def collect() -> list[Any]:
        extension = await pack.comfy_entrypoint()
        return await extension.get_node_list()

    listed = asyncio.run(collect())
    assert isinstance(listed, list), "get_node_list must return a list"
    return {cls.GET_SCHEMA().node_id: cls for cls in listed}


def refusal(cls: Any, **constants: Any) -> str:
    """Why 0.3.64 would not queue a node with these constants; "" if it would. It checks the limits of numbers only
    where `validate_inputs` does not name them (60 §2)."""
    check = cls.__dict__.get("validate_inputs")
    named = inspect.getfullargspec(check.__func__).args if check else []
    slots = {slot.id: slot for slot in cls.GET_SCHEMA().inputs}
    for name, value in constants.items():
        slot = slots[name]
        try:
            constants[name] = {"INT": int, "FLOAT": float}.get(slot.io_type, lambda same: same)(value)
        except (TypeError, ValueError) as error:
            return f"{name}: {error}"
        low, high = slot.extra.get("min"), slot.extra.get("max")
        if name not in named and low is not None and (constants[name] < low or constants[name] > high):
            return f"Value {value} of {name} is outside {low} to {high}"
    answer = cls.validate_inputs(**{k: v for k, v in constants.items() if k in named}) if check else True
    return "" if answer is True else answer


def execute(cls: Any, *, node_id: str = "1", **inputs: Any) -> Any:
    """Call a node as ComfyUI does: on a locked copy of the class, with the hidden values set, in inference mode."""
    import torch

    clone = cls.PREPARE_CLASS_CLONE({"UNIQUE_ID": node_id, "PROMPT": {}, "EXTRA_PNGINFO": {}})
    with torch.inference_mode():
        if "check_lazy_status" in cls.__dict__:
            assert clone.check_lazy_status(**inputs) == []
        return clone.EXECUTE_NORMALIZED(**inputs)
