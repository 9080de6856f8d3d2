"""Files that appear under their name only when they are finished (80 line 20), paths and JSON as people give them."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import RequestError


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new file in the same folder that takes the name `target` if the block succeeds, and vanishes if it does not.

    RequestError if the folder or the file cannot be written.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.touch(exist_ok=False)
    except OSError as error:
        raise RequestError(f"The folder {target.parent} cannot be written: {error.strerror}.") from error
    try:
        yield partial
        partial.replace(target)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)


def expand(path: Path | str) -> Path:
    """The path with ~ replaced; RequestError for none at all, and for the home of a user who is not known."""
    if not str(path):
        raise RequestError("The path is empty; name a file or a folder.")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise RequestError(f"There is no folder {Path(path).parts[0]}; write the path {path} in full.") from None


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, of a file's bytes with or without a byte order mark; ValueError for anything else."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
