"""The arrows between the parts of the project hold, and importing it does nothing else."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("nodes", "headless", "stages", "magi2_core", "distributed")
MAY_IMPORT = {
    "nodes": {"nodes", "stages", "magi2_core", "distributed"},
    "headless": {"headless", "stages", "magi2_core", "distributed"},
    "stages": {"stages", "magi2_core", "distributed"},
    "magi2_core": {"magi2_core", "distributed.layout", "distributed.exchange"},
    "distributed": {"distributed"},
}
COMFY = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "server", "execution", "nodes"}
# All others are slow to import, absent on some machines or needed by some features alone: imported where they are used.
IMPORTED_WITH_A_MODULE = {"torch", "numpy", "PIL", "pydantic", "tqdm"}


def modules(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every import of a file as (dotted name, relative level), wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield from ((f"{base}.{alias.name}".strip("."), node.level) for alias in node.names)


def own_imports(path: Path) -> Iterator[str]:
    """Yield the project's own modules that a file imports, from the root: `distributed.layout.split_evenly`."""
    package = path.relative_to(ROOT).parts[:-1]
    for name, level in imports(path):
        if level:
            yield ".".join((*package[: len(package) - level + 1], name))


@pytest.mark.parametrize("part", PARTS)
def test_each_part_imports_only_what_it_may(part: str) -> None:
    for path in modules(part):
        for name in own_imports(path):
            allowed = any(name == arrow or name.startswith(f"{arrow}.") for arrow in MAY_IMPORT[part])
            assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("part", ["headless", "stages", "magi2_core", "distributed"])
def test_only_the_node_layer_imports_comfyui(part: str) -> None:
    for path in modules(part):
        found = {name.split(".")[0] for name, level in imports(path) if not level} & COMFY
        assert not found, f"{path.relative_to(ROOT)} imports {found}"


def test_the_package_imports_itself_by_relative_names_only() -> None:
    for part in PARTS:
        for path in modules(part):
            absolute = [name for name, level in imports(path) if not level and name.startswith("magi2_native")]
            assert not absolute, f"{path.relative_to(ROOT)} imports {absolute}"


class ModuleLevel(ast.NodeVisitor):
    """Collects the packages that a file imports outside its functions."""

    def __init__(self, path: Path) -> None:
        self.packages: set[str] = set()
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def visit_FunctionDef(self, node: ast.AST) -> None:
        pass

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        self.packages |= {alias.name.split(".")[0] for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level and node.module:
            self.packages.add(node.module.split(".")[0])


@pytest.mark.parametrize("part", ["headless", "stages", "magi2_core", "distributed"])
def test_importing_a_module_needs_few_packages(part: str) -> None:
    for path in modules(part):
        others = ModuleLevel(path).packages - sys.stdlib_module_names
        assert others <= IMPORTED_WITH_A_MODULE, f"{path.relative_to(ROOT)} imports {others}"


def test_importing_every_module_starts_nothing() -> None:
    names = [
        ".".join(("magi2_native", *path.relative_to(ROOT).with_suffix("").parts))
        for part in ("magi2_core", "distributed", "headless", "stages")
        for path in modules(part)
        if path.name not in ("__init__.py", "bootstrap.py")
    ]
    program = f"""
import importlib, multiprocessing, os, sys, threading
import torch
environment = dict(os.environ)
for name in {names!r}:
    importlib.import_module(name)
assert dict(os.environ) == environment
assert threading.active_count() == 1 and not multiprocessing.active_children()
assert not torch.cuda.is_initialized() and not torch.distributed.is_initialized()
assert not {COMFY!r} & set(sys.modules), {COMFY!r} & set(sys.modules)
"""
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd="/")
    assert result.returncode == 0, result.stderr


def test_what_is_needed_is_listed_alike_for_pip_for_comfyui_and_in_messages() -> None:
    from magi2_native.magi2_core.conditioning.tokenizer import OLDEST_TRANSFORMERS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (ROOT / "requirements.txt").read_text(encoding="utf-8").split("\n")[:-1] == project["dependencies"]
    assert f"transformers>={'.'.join(map(str, OLDEST_TRANSFORMERS))}" in project["dependencies"]


def test_what_the_registry_leaves_out_is_there_and_in_no_package() -> None:
    """A package whose folder is missing keeps the published pack from being installed."""
    lines = (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines()
    left_out = {line.strip("/") for line in lines if not line.startswith("#")}
    assert {name for name in left_out if not (ROOT / name).exists()} == set()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert not {name.removeprefix("magi2_native.").split(".")[0] for name in packages} & left_out
