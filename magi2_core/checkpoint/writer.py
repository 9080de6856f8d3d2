"""Safetensors files written so that a disk that fails is an OSError, as it is for every other file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch import Tensor


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors, each contiguous and with memory of its own, to a safetensors file that everybody can read.

    OSError if it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise (OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))) from error
    path.chmod(0o644)  # the library makes it readable by its owner alone
