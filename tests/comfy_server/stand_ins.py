"""Tiny packages in place of what ComfyUI imports but our workflows never call (60 §13).

ComfyUI does not start without a module called torchvision. On a machine that has none, these stand-ins let the
server start; any function taken from them raises when it is called. They are written into a test's temporary folder
and exist in the server process alone: in a worker, transformers would take them for the real thing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SUBMODULES = {
    "torchvision": ("transforms", "transforms.functional", "transforms.v2", "ops", "models", "io", "utils"),
    "torchaudio": ("transforms", "functional", "lib"),
}

_MODULE = '''
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise RuntimeError(f"{__name__}.{name} was called, but {__name__} is only a stand-in for tests")

    return missing
'''

# Python runs a module of this name at every start; a search path would be handed down to the workers
_SITECUSTOMIZE = '''
import sys
from importlib.machinery import PathFinder


class StandIns:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return PathFinder.find_spec(name, [{folder!r}]) if name in {names!r} else None


if any(argument.endswith("main.py") for argument in sys.orig_argv):
    sys.meta_path.append(StandIns)
'''


def missing_packages(python: str) -> list[str]:
    """The packages among torchvision, torchaudio and comfyui_workflow_templates that `python` does not have."""
    names = [*_SUBMODULES, "comfyui_workflow_templates"]
    code = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n) is None])"
    found = subprocess.run([python, "-I", "-c", code, *names], capture_output=True, text=True, check=True)
    return found.stdout.split()


def write_stand_ins(folder: Path, python: str = sys.executable) -> Path:
    """Write a stand-in for each missing package into `folder`, which then belongs on the server's PYTHONPATH."""
    names = missing_packages(python)
    modules = folder / "modules"
    for name in names:
        for module in ("", *_SUBMODULES.get(name, ())):
            target = modules.joinpath(name, *module.split("."))
            target.mkdir(parents=True, exist_ok=True)
            (target / "__init__.py").write_text(_MODULE if name in _SUBMODULES else "")
    if "comfyui_workflow_templates" in names:
        (modules / "comfyui_workflow_templates" / "templates").mkdir(exist_ok=True)
        (modules / "comfyui_workflow_templates" / "templates" / "index.json").write_text("[]")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(folder=str(modules), names=names))
    return folder
