"""`./demo` with a ComfyUI at hand: the shipped workflows on a real server, with a miniature and two workers.

    COMFYUI_ROOT=~/ComfyUI ./demo
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ...headless.demo import TEMPLATES, demo, make_clip, write_inputs
from .server import comfyui_python, comfyui_root, running_server


def main() -> int:
    return demo("Make two clips on a real ComfyUI server, with a miniature checkpoint.", run)


def run(options: argparse.Namespace) -> None:
    """Start ComfyUI with the pack, and queue the shipped workflows."""
    root = comfyui_root()
    assert root is not None, "There is no ComfyUI; set COMFYUI_ROOT to its folder."
    print(f"ComfyUI: {root}, run by {comfyui_python(root)}")
    with tempfile.TemporaryDirectory(prefix="magi2-demo-") as temporary:
        base = Path(temporary)
        write_inputs(base / "models" / "magi2" / "miniature", base / "input")
        with running_server(base, environment={"MAGI2_DEVICES": f"{options.workers}xcpu"}) as server:
            print(f"ComfyUI runs at {server.url} with the pack, until this demo ends.")
            for template in TEMPLATES:
                make_clip(
                    "queue", template, options, "--server", server.url,
                    "--set", "Magi2LoadCheckpoint.checkpoint=miniature",
                )  # fmt: skip
    print("\nComfyUI and its workers have ended.")


if __name__ == "__main__":
    sys.exit(main())
