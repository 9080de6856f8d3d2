"""`./demo` with a ComfyUI at hand: the shipped workflows on a real server, with a miniature and two workers.

    COMFYUI_ROOT=~/ComfyUI ./demo
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from ...headless.demo import check_clip, draw_picture
from ...headless.queue import queue_workflow
from ...headless.terminal import TerminalEvents
from ...headless.workflow import read_workflow, set_inputs
from ...magi2_core.checkpoint.miniature import write_miniature
from ...magi2_core.errors import Magi2Error
from .make_templates import CHECKPOINT
from .server import PACK, running_server

TEMPLATES = ("text_to_clip", "picture_to_clip")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./demo", description="Make two clips on a real ComfyUI server.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the clips")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    try:
        return demo(options.output, options.steps, options.workers)
    except (Magi2Error, AssertionError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1


def demo(folder: Path, steps: int, workers: int) -> int:
    """Start ComfyUI with the pack, queue both templates as they are but for the steps, and check the clips."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="magi2-demo-") as temporary:
        base = Path(temporary)
        write_miniature(base / "models" / "magi2" / CHECKPOINT, seed=0)
        (base / "input").mkdir()
        draw_picture(base / "input" / "example.png")
        with running_server(base, environment={"MAGI2_DEVICES": f"{workers}xcpu"}) as server:
            print(f"ComfyUI runs at {server.url} with the pack and a miniature checkpoint of random weights.")
            for name in TEMPLATES:
                print(f"\n{name}")
                workflow = read_workflow(PACK / "workflows" / "api" / f"{name}.json")
                set_inputs(workflow, [f"Magi2Sampler.steps={steps}"])
                with TerminalEvents() as events:
                    (clip,) = queue_workflow(workflow, server.url, folder / name, events)
                check_clip(clip)
                print(f"{clip}\n  checked by decoding it: frames, size, rate and sound are exact")
    print(f"\nComfyUI and its workers have ended. Done in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
