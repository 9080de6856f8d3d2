"""Files that appear under their name only when they are finished (80 line 20)."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .errors import RequestError


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new file in the same folder that takes the name `target` if the block succeeds, and vanishes if it does not.

    RequestError if the folder or the file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".partial")
    except OSError as error:
        raise RequestError(f"The folder {target.parent} cannot be written: {error.strerror}.") from error
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)
        partial.replace(target)
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        partial.unlink(missing_ok=True)
