"""`./demo`: the shipped workflows on a miniature checkpoint, run by `magi2 run` with a pool of two workers."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from ..magi2_core.checkpoint.miniature import write_miniature
from ..magi2_core.codecs.media import read_back
from ..magi2_core.errors import Magi2Error
from .cli import main as magi2
from .terminal import TerminalEvents

WORKFLOWS = Path(__file__).resolve().parents[1] / "workflows" / "api"
TEMPLATES = ("text_to_clip", "picture_to_clip")
EXPECTED = (125, 448, 256, Fraction(25, 2), 441_000, 44_100, 2)


def main() -> int:
    def run(options: argparse.Namespace) -> None:
        models = options.output / "models"
        write_inputs(models / "miniature", options.output / "input")
        for template in TEMPLATES:
            make_clip(
                "run", template, options, "--models", str(models), "--input", str(options.output / "input"),
                "--set", "Magi2LoadCheckpoint.checkpoint=miniature",
                "--set", f"Magi2LoadCheckpoint.devices={options.workers}xcpu",
            )  # fmt: skip
        print("\nThe same on a real ComfyUI that you have installed: COMFYUI_ROOT=/path/to/ComfyUI ./demo")

    return demo("Make two clips with a miniature checkpoint.", run)


def demo(description: str, run: Callable[[argparse.Namespace], None]) -> int:
    """Read the options of a demo, run it, and return its exit code."""
    parser = argparse.ArgumentParser(prog="./demo", description=description)
    parser.add_argument("--output", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    started = time.monotonic()
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        run(options)
    except KeyboardInterrupt:
        return 130
    except (Magi2Error, OSError, AssertionError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


def write_inputs(checkpoint: Path, pictures: Path) -> None:
    """A miniature checkpoint, and the picture that the workflows name."""
    print(f"A miniature checkpoint of random weights: {checkpoint}", flush=True)
    with TerminalEvents() as events:
        write_miniature(checkpoint, seed=0, events=events)
    pictures.mkdir(parents=True, exist_ok=True)
    draw_picture(pictures / "example.png")


def make_clip(command: str, template: str, options: argparse.Namespace, *more: str) -> None:
    """Run a shipped workflow by a command of `magi2`, which is printed so that it can be copied, and check the clip.

    Raises Magi2Error if the command fails or the clip is not exactly one of 272p, KeyboardInterrupt if that ended it.
    """
    folder = options.output / template
    arguments = [command, str(WORKFLOWS / f"{template}.json"), "--output", str(folder), *more,
                 "--set", f"Magi2Sampler.steps={options.steps}"]  # fmt: skip
    print("\n" + shlex.join([str(Path(sys.executable).with_name("magi2")), *arguments]), flush=True)
    before = set(folder.rglob("*.mp4"))
    code = magi2(arguments)
    if code > 128:
        raise KeyboardInterrupt
    if code:
        raise Magi2Error("The command above ended with an error.")
    (clip,) = set(folder.rglob("*.mp4")) - before
    check_clip(clip)
    print("  checked by decoding it: 125 frames of 448x256 at 25/2 fps, 441,000 stereo samples at 44.1 kHz")
    print("  The picture is noise, because the weights are; a real checkpoint takes the same way.", flush=True)


def check_clip(path: Path) -> None:
    """Decode a clip and raise Magi2Error unless its counts are exactly those of a 272p clip."""
    facts = read_back(path)
    size = (facts.frames, facts.width, facts.height, facts.frame_rate)
    found = (*size, facts.samples, facts.sample_rate, facts.channels)
    if found != EXPECTED:
        raise Magi2Error(f"{path} holds (frames, width, height, fps, samples, Hz, channels) {found}, not {EXPECTED}.")


def draw_picture(path: Path) -> None:
    """A picture of our own to start from: a sun over the sea."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (640, 360), (112, 176, 224))
    draw = ImageDraw.Draw(image)
    draw.ellipse((420, 60, 520, 160), fill=(255, 220, 120))
    draw.rectangle((0, 220, 640, 360), fill=(24, 84, 132))
    for y in range(230, 360, 14):
        draw.line((0, y, 640, y + 4), fill=(60, 128, 176), width=3)
    image.save(path)


if __name__ == "__main__":
    sys.exit(main())
