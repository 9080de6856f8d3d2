"""What people type on the command line, as values; RequestError or argparse's own error for what is none."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from ..distributed.layout import MOST_RANKS
from ..magi2_core.conditioning.markers import figure_number, marker, parse_pictures, picture_order
from ..magi2_core.errors import RequestError
from ..magi2_core.files import expand, parse_json

logger = logging.getLogger("magi2")


def read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt from the command line or from a UTF-8 file, whose surrounding white space is dropped (30 §14)."""
    if (text is None) == (file is None):
        raise RequestError("Give the prompt with --prompt or with --prompt-file, and not with both.")
    if text is not None:
        return text
    assert file is not None
    try:
        prompt = file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"The prompt file {file} cannot be read: {error}.") from error
    if file.suffix.lower() == ".json":  # as any other text it would be used as it is
        try:
            parse_json(prompt)
        except ValueError as error:
            raise RequestError(f"The prompt file {file} is no JSON: {error}.") from error
    return prompt


def name_pictures(arguments: Sequence[str], *, numeric: bool = False) -> dict[int, Path]:
    """Pictures by figure number, in the order in which they enter the sequence (30 §5).

    Either one argument as the reference takes it, a path or a JSON map, or paths that are numbered from 1.
    """
    if len(arguments) == 1:
        if not arguments[0].strip():
            logger.warning("--image is empty, so this clip is made without a picture.")
        named = parse_pictures(arguments[0])
    elif any(argument.lstrip().startswith("{") for argument in arguments):
        raise RequestError("A map of pictures names all of them; give it as the only --image.")
    else:
        named = {marker(figure): path for figure, path in enumerate(arguments, 1)}
    pictures: dict[int, Path] = {}
    for key in picture_order(named, numeric=numeric):
        figure = figure_number(key)
        if figure in pictures:
            raise RequestError(f"Two pictures are {marker(figure)}; name them <Figure 1>, <Figure 2> and so on.")
        pictures[figure] = Path(named[key])
    return pictures


def size(text: str) -> tuple[int, int]:
    """Read "1920x1080" as (width, height)."""
    width, _, height = text.lower().partition("x")
    if not (width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write it as 1920x1080")
    return int(width), int(height)


def path(text: str) -> Path:
    """A path, with ~ replaced."""
    try:
        return expand(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def folder(text: str) -> Path:
    """An existing folder."""
    if not (named := path(text)).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return named


def devices(names: str | None, workers: int | None) -> list[str] | None:
    """The device list of a plan: the named ones, repeated for the workers where it is the CPU alone."""
    listed = [name.strip() for name in names.split(",") if name.strip()] if names is not None else None
    if workers is None:
        return listed
    if not 1 <= workers <= MOST_RANKS:
        raise RequestError(f"The number of workers is {workers}; it must be 1 to {MOST_RANKS}.")
    if listed is None:
        import torch

        listed = [f"cuda:{i}" for i in range(min(workers, torch.cuda.device_count()))] or ["cpu"]
    if listed == ["cpu"]:
        return ["cpu"] * workers
    if workers > len(listed):
        raise RequestError(f"{workers} workers need as many devices, and there are {len(listed)}: {', '.join(listed)}.")
    return listed[:workers]
