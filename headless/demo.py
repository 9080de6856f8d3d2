"""`./demo`: a miniature checkpoint, a clip from text and a clip from a picture, made by a pool of two workers."""

from __future__ import annotations

import argparse
import sys
import time
from fractions import Fraction
from pathlib import Path

from ..magi2_core.checkpoint.miniature import write_miniature
from ..magi2_core.codecs.media import read_back
from ..magi2_core.errors import Magi2Error
from ..magi2_core.memory.plan import make_plan
from ..magi2_core.sampling.denoise import SamplingSettings
from .generate import ClipRequest, generate
from .session import open_session
from .terminal import TerminalEvents

PROMPT = "A red kite climbs over a windy beach while waves break and gulls call."
EXPECTED = (125, 448, 256, Fraction(25, 2), 441_000, 44_100, 2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./demo", description="Make two clips with a miniature checkpoint.")
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint and the clips")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    try:
        return demo(options.output, options.steps, options.workers)
    except (Magi2Error, RuntimeError) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1


def demo(folder: Path, steps: int, workers: int) -> int:
    """Make both clips, check what the files really hold, and say so."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, picture = folder / "checkpoint", folder / "picture.png"
    print(f"A miniature checkpoint of random weights: {checkpoint}")
    write_miniature(checkpoint, seed=0)
    draw_picture(picture)
    clips = {"text to clip": ({}, folder / "text.mp4"), "picture to clip": ({1: picture}, folder / "picture.mp4")}
    plan = make_plan(checkpoint, devices=["cpu"] * workers)
    with TerminalEvents() as events, open_session(plan) as session:
        for name, (images, output) in clips.items():
            print(f"\n{name}: {output}")
            request = ClipRequest(PROMPT, output, images=images, resolution="272p", settings=SamplingSettings(steps))
            generate(request, session, events)
    print()
    for name, (_, output) in clips.items():
        check_clip(output)
        print(f"{name}: {output}")
        print("  checked by decoding it: 125 frames of 448x256 at 25/2 fps, 441,000 stereo samples at 44.1 kHz")
    print("The pictures are noise, because the weights are; a real checkpoint takes the same way.")
    print(f"Done in {time.monotonic() - started:.0f} s.")
    return 0


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
