"""Start a worker from a process whose main program must not run again in it (60 §6.2, §6.3)."""

from __future__ import annotations

import multiprocessing.spawn
import tempfile
import threading
from multiprocessing.process import BaseProcess
from typing import Any

_PATCHING = threading.Lock()


def start(process: BaseProcess, path: list[str]) -> None:
    """Start a spawned process that imports from `path` and re-runs nothing of the caller's main program.

    Python would have the child import the parent's `__main__`: under ComfyUI all of its main.py, which reads arguments,
    loads other packs and creates a CUDA context. What the child is told about the parent is therefore replaced, for the
    time of the call and for this thread alone.
    """
    thread = threading.get_ident()
    with _PATCHING:
        original = multiprocessing.spawn.get_preparation_data

        def preparation(name: str) -> dict[str, Any]:
            if threading.get_ident() != thread:
                return original(name)
            folder = tempfile.gettempdir()  # the parent's own folder may no longer exist
            return {
                "name": name, "sys_path": path, "sys_argv": ["magi2-worker"], "dir": folder, "orig_dir": folder,
                "start_method": "spawn",
            }  # fmt: skip

        multiprocessing.spawn.get_preparation_data = preparation
        try:
            process.start()
        finally:
            multiprocessing.spawn.get_preparation_data = original
