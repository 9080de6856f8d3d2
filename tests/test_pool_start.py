"""Workers start from any parent: under ComfyUI's way of loading packs, from any folder; they see nothing of it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from magi2_native.distributed.environment import clean_environment, worker_path

ROOT = Path(__file__).resolve().parents[1]

# A main program as ComfyUI's: it parses arguments, has modules with common names beside it, and loads the pack under
# the path of its folder. Whoever runs it again, or can import what stands beside it, prints a line.
MAIN = """
import sys
print("the main program ran as", __name__, flush=True)
if sys.argv[1:] != ["--listen"]:
    print("unknown arguments", sys.argv, flush=True)
import utils
if __name__ == "__main__":
    import importlib.util, os, shutil, tempfile
    here = os.path.dirname(os.path.abspath(__file__))
    folder = os.path.join(here, "custom_nodes", "a pack")
    name = folder.replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, "__init__.py"))
    pack = importlib.util.module_from_spec(spec)
    sys.modules[name] = pack
    spec.loader.exec_module(pack)
    pools = importlib.import_module(name + ".distributed.pool")
    layouts = importlib.import_module(name + ".distributed.layout")
    assert not any(module.startswith("magi2_native") for module in sys.modules)
    lost = tempfile.mkdtemp()
    os.chdir(lost)
    shutil.rmtree(lost)  # a folder that no longer exists
    engine = "magi2_native.tests.pool_engines:make_engine"
    spec = pools.PoolSpec(engine, {}, layouts.ParallelLayout(sp=2), hidden_paths=(here,))
    with pools.Pool(spec) as pool:
        seen = pool.submit("where").result()
        again = pool.submit("walk", {"steps": 2}).result()
    assert again == {"total": 60}, again
    foreign = [module for module in seen["modules"] if module.split(".")[0] in ("utils", "server", "nodes", "comfy")]
    assert not foreign, foreign
    assert here not in seen["path"], seen["path"]
    assert not any("a pack" in module for module in seen["modules"])
    assert seen["arguments"] == ["magi2-worker"]
    print("done", flush=True)
"""


@pytest.fixture
def comfy(tmp_path: Path) -> Path:
    """A folder that looks like a ComfyUI with this pack in it."""
    root = tmp_path / "an app.d"
    pack = root / "custom_nodes" / "a pack"
    pack.parent.mkdir(parents=True)
    unneeded = shutil.ignore_patterns(".*", "__pycache__", "cases", "*.egg-info", "docs", "web", "workflows")
    shutil.copytree(ROOT, pack, ignore=unneeded)
    (root / "main.py").write_text(MAIN)
    for name in ("utils", "server", "nodes", "comfy"):
        (root / f"{name}.py").write_text(f"print('{name} was imported by', __import__('os').getpid(), flush=True)\n")
    return root


def without_install() -> dict[str, str]:
    """An environment in which `magi2_native` cannot be imported as an installed package."""
    return {**os.environ, "PYTHONPATH": site.getsitepackages()[0]}


@pytest.mark.parametrize("how", ["script", "module"])
def test_workers_start_under_a_path_like_name_and_never_run_the_main_program(comfy: Path, how: str) -> None:
    program = ["main.py"] if how == "script" else ["-m", "main"]
    # -S: without the .pth files of installed packages, so that only the pack's own folder can provide the code.
    run = subprocess.run(
        [sys.executable, "-S", *program, "--listen"], cwd=comfy, capture_output=True, text=True, env=without_install(),
        check=False,
    )  # fmt: skip
    lines = run.stdout.splitlines()
    assert lines[-1:] == ["done"], run.stdout + run.stderr
    assert lines[0] == "the main program ran as __main__"
    assert [line.split(" by")[0] for line in lines[1:-1]] == ["utils was imported"], "only the parent imports it"


def test_paths_inside_the_application_are_hidden_but_not_its_installed_packages(tmp_path: Path) -> None:
    app = tmp_path / "app"
    inside = app / "venv" / "lib" / "python3.11" / "site-packages"
    inside.mkdir(parents=True)
    outside = tmp_path / "elsewhere"
    (tmp_path / "link").symlink_to(app)
    standard = os.path.dirname(os.__file__)
    path = ["", ".", str(app), str(app / "comfy"), str(tmp_path / "link"), str(inside), str(outside), standard]
    assert worker_path(path, [str(app)]) == [str(inside), str(outside), standard]
    assert worker_path([str(tmp_path / "application")], [str(app)]) == [str(tmp_path / "application")]
    assert worker_path([str(app), ""], []) == [str(app)]
    assert worker_path(sys.path, [sys.base_prefix]).count(standard) == 1


def test_the_environment_loses_another_launchers_rendezvous_and_one_allocator_item() -> None:
    environment = {
        "PATH": "/bin", "MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
        "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "CUDA_VISIBLE_DEVICES": "3,1", "OMP_NUM_THREADS": "5",
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],backend:cudaMallocAsync,max_split_size_mb:8",
        "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync",
    }  # fmt: skip
    clean_environment(environment, ranks=2)
    assert environment == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3,1", "OMP_NUM_THREADS": "5", "GLOO_SOCKET_IFNAME": "lo",
        "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:8",
    }  # fmt: skip


def test_ranks_share_the_processor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for ranks, threads in ((1, "16"), (4, "4"), (6, "2"), (32, "1")):
        environment: dict[str, str] = {}
        clean_environment(environment, ranks)
        assert environment["OMP_NUM_THREADS"] == threads


def test_a_bare_interpreter_that_is_bootstrapped_imports_every_module_and_nothing_of_comfyui() -> None:
    names = [
        "magi2_native." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for part in ("distributed", "magi2_core")
        for path in sorted((ROOT / part).rglob("*.py"))
        if path.stem not in ("__init__", "bootstrap")
    ]
    program = f"""
import importlib, runpy, sys
runpy.run_path({str(ROOT / "distributed" / "bootstrap.py")!r})["register_package"]({str(ROOT)!r})
for name in {names!r}:
    importlib.import_module(name)
assert {str(ROOT)!r} not in sys.path
print(sorted({{"comfy", "server", "nodes", "folder_paths", "magi2_native.nodes"}} & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-S", "-P", "-c", program], capture_output=True, text=True, env=without_install(), cwd="/",
        check=False,
    )  # fmt: skip
    assert run.stdout == "[]\n", run.stderr


def test_the_bootstrap_imports_only_the_standard_library_until_the_environment_is_set() -> None:
    program = f"""
import runpy, sys
before = set(sys.modules)
names = runpy.run_path({str(ROOT / "distributed" / "bootstrap.py")!r})
names["register_package"]({str(ROOT)!r})
import magi2_native.distributed.orphan, magi2_native.distributed.environment
new = {{name.split(".")[0] for name in set(sys.modules) - before}} - {{"magi2_native", "__mp_main__"}}
print(sorted(name for name in new if name not in sys.stdlib_module_names))
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "[]\n", run.stderr
