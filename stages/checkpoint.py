"""The loader's stage: which checkpoint, on which devices, divided how. Reads headers only (design: one plan)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..distributed.layout import MOST_RANKS
from ..magi2_core.checkpoint.inspect import require
from ..magi2_core.errors import RequestError
from ..magi2_core.memory.plan import make_plan
from .folders import Folders, checkpoint_name, resolve_checkpoint
from .values import Model

DEVICES_VARIABLE = "MAGI2_DEVICES"


def load_checkpoint(
    checkpoint: str,
    devices: str = "auto",
    layout: str = "auto",
    dtype: str = "bfloat16",
    residency: str = "auto",
    start_anyway: bool = False,
    refiner_residual: str = "float32",
    *,
    folders: Folders,
) -> Model:
    """Check what every clip takes of a checkpoint and plan how it runs on this machine; nothing is loaded yet.

    Raises CheckpointError with all problems of files that are damaged or missing (80 line 18), and RequestError or
    LayoutError for a plan that cannot be made, or that does not fit into the memory that is there unless
    `start_anyway` is on.
    """
    root = resolve_checkpoint(checkpoint, folders)
    require(root, ["T2VA"])
    plan = make_plan(
        root, layout=layout.strip(), devices=parse_devices(devices), dtype=dtype, residency=residency,
        refiner_residual=refiner_residual,
    )  # fmt: skip
    if plan.shortage and not start_anyway:
        raise RequestError(f"{plan.describe()}\nTurn on start_anyway to try it all the same.")
    return Model(checkpoint_name(root, folders), plan, checkpoint_identity(root))


def check_pictures(model: Model) -> None:
    """CheckpointError with all problems of what a picture takes beside what `load_checkpoint` has checked."""
    require(model.plan.checkpoint, ["I2VA"], beyond=["T2VA"])


def check_refiner(model: Model) -> None:
    """CheckpointError with all problems of what 1080p takes beside what `load_checkpoint` has checked."""
    require(model.plan.checkpoint, ["1080p"], beyond=["T2VA"])


def parse_devices(text: str) -> list[str] | None:
    """Read a device list: "auto", "0,1", "cuda:0, cuda:2", "cpu", "cpu,cpu" or "2xcpu"; None means every GPU.

    "auto" takes the environment variable MAGI2_DEVICES if the server sets one. Raises RequestError for anything else;
    whether the devices are there is for the plan to say.
    """
    if text.strip().lower() in ("", "auto"):
        fixed = os.environ.get(DEVICES_VARIABLE, "").strip()
        if fixed.lower() in ("", "auto"):
            return None
        try:
            return parse_devices(fixed)
        except RequestError as error:
            raise RequestError(f"The environment variable {DEVICES_VARIABLE} cannot be used. {error}") from error
    devices: list[str] = []
    for item in text.split(","):
        match = re.fullmatch(r"(?:(?:(\d+)\s*x\s*)?(cpu)|(?:cuda:)?(\d+)|(cuda))", item.strip().lower())
        if match is None:
            raise RequestError(
                f"{item.strip()!r} in the device list {text!r} is not a device. Write auto, GPU numbers such as 0,1"
                " (or cuda:0,cuda:1), cpu, or 2xcpu for two workers on the CPU."
            )
        count, cpu, number, _ = match.groups()
        if len(devices) + int(count or 1) > MOST_RANKS:
            raise RequestError(f"The device list {text!r} asks for more than {MOST_RANKS} workers.")
        devices += ["cpu"] * int(count or 1) if cpu else [f"cuda:{int(number)}" if number else "cuda"]
    if not devices:
        raise RequestError(f"The device list {text!r} asks for no device.")
    return devices


def checkpoint_identity(root: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every weight and configuration file: changes when one is replaced (60 §5).

    Never raises and reads no file: it is asked for before every run.
    """
    found = []
    for file in sorted(root.glob("*/*")) + sorted(root.glob("*.json")):
        try:
            status = file.stat()
        except OSError:
            continue
        found.append((file.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return tuple(found)
