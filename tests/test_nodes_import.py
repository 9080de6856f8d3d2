"""Importing the pack: quick, without side effects, and clear about what is missing (60 §1, 80 line 10)."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# what a bare machine may lack; the import must not need any of it
MISSING = (
    "transformers", "tokenizers", "triton", "flash_attn", "av", "scipy", "openai", "diffusers", "tqdm", "pydantic"
)  # fmt: skip
NODES = sorted(path.stem for path in (ROOT / "web" / "docs").glob("*.md"))

PROGRAM = """
import sys, json, time, threading, multiprocessing, os, tempfile, pathlib
import torch, asyncio, aiohttp.web  # the server has imported these before it loads packs
from magi2_native.tests.comfy_stub import installed, load_pack, node_classes
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise {error}
sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
environment = dict(os.environ)
with installed(pathlib.Path(tempfile.mkdtemp())) as stub:
    started = time.process_time()
    pack = load_pack()
    classes = node_classes(pack)
    seconds = time.process_time() - started
print(json.dumps({{
    "seconds": seconds,
    "nodes": sorted(classes),
    "threads": threading.active_count(),
    "children": len(multiprocessing.active_children()),
    "cuda": torch.cuda.is_initialized(),
    "environment": dict(os.environ) == environment,
    "mappings": hasattr(pack, "NODE_CLASS_MAPPINGS"),
    "web": pack.WEB_DIRECTORY,
}}))
"""


def load_in_a_fresh_process(cache: Path, error: str = 'ImportError(f"{name} is missing")') -> dict:
    program = PROGRAM.format(missing=MISSING, error=error)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(cache)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd="/", env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_the_pack_loads_quickly_without_optional_packages_and_starts_nothing(tmp_path: Path) -> None:
    # the first of them compiles; as ever after a first start, the byte code is there for the others
    found = min((load_in_a_fresh_process(tmp_path) for _ in range(3)), key=lambda each: each["seconds"])
    assert found["seconds"] < 0.2, f"{found['seconds']:.2f} s beyond torch"
    assert found["nodes"] == NODES
    assert found["threads"] == 1
    assert found["children"] == 0
    assert not found["cuda"]
    assert found["environment"]
    assert not found["mappings"], "with V1 mappings ComfyUI would ignore the V3 nodes"
    assert found["web"] == "./web"


def test_packages_that_are_broken_rather_than_missing_do_not_matter_either(tmp_path: Path) -> None:
    assert load_in_a_fresh_process(tmp_path, 'OSError("libcudart.so.13: cannot open")')["nodes"] == NODES


def test_an_old_comfyui_is_told_which_version_is_needed() -> None:
    program = """
import sys, types
sys.modules["comfy_api"] = types.ModuleType("comfy_api")
import magi2_native.nodes.comfy
"""
    result = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, cwd="/")
    assert result.returncode != 0
    assert "ImportError: MAGI-2 Native needs ComfyUI >= 0.3.64" in result.stderr


def test_the_pack_does_not_run_before_comfyui() -> None:
    assert not (ROOT / "prestartup_script.py").exists()
