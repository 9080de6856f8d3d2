"""The two pickles of a release: the Wan 2.2 VAE and the training checkpoint of the Turbo decoder (40 §3.1, §4.2)."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .index import existing_file
from .problem import BadFileError, Problem

_ZIP = b"PK\x03\x04"
_OLD = b"\x80"  # of the format before the zip: a pickle of protocol 2 or later


def load_state_dict(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickled checkpoint: `ema_state_dict`, else `state_dict`, else the dictionary itself (40 §4.2).

    It is loaded with `weights_only=True`; the tensors stay on disk, memory-mapped, until they are read.
    Raises BadFileError for a file that is missing, damaged, or needs code to be run to be loaded (80, line 19), and for
    a tensor whose values are not there.
    """
    value = _load_pickle(path)
    for wrapper in ("ema_state_dict", "state_dict"):
        if isinstance(value.get(wrapper), Mapping):
            value = value[wrapper]
            break
    tensors = {key: tensor for key, tensor in value.items() if isinstance(key, str) and isinstance(tensor, Tensor)}
    for key, tensor in tensors.items():
        name = key.encode("utf-8", "backslashreplace").decode()
        if name != key:
            raise BadFileError(Problem(path, "a name in UTF-8", "one that is not", name))
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != "cpu":
            kind = "nested" if tensor.is_nested else f"{tensor.layout}".removeprefix("torch.")
            raise BadFileError(Problem(path, "a dense tensor", f"a {kind} tensor of the device {tensor.device}", name))
    return tensors


def turbo_names(stored: Iterable[str]) -> dict[str, str]:
    """Decoder tensor names of a Turbo checkpoint and the names that they have in the file.

    One leading `module.` is taken off; only `decoder.` names count. A file whose names begin with neither `decoder.`
    nor `encoder.` holds the bare decoder (40 §4.2).
    """
    names = {key.removeprefix("module."): key for key in stored}
    decoder = {name: key for name, key in names.items() if name.startswith("decoder.")}
    if decoder or next(iter(names), "encoder.").startswith("encoder."):
        return decoder
    return {f"decoder.{name}": key for name, key in names.items()}


def _load_pickle(path: Path) -> dict[str, Any]:
    existing_file(path)
    with path.open("rb") as file:
        head = file.read(16)
    if not head.startswith((_ZIP, _OLD)):
        raise BadFileError(Problem(path, "a file written by torch.save", f"another, which begins with {head!r}"))
    try:
        # torch can map only its zip format; files older than that are read whole.
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=head.startswith(_ZIP))
    except pickle.UnpicklingError as error:
        raise BadFileError(Problem(path, "a pickle of tensors alone", _refused(path, error))) from None
    except (RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadFileError(Problem(path, "a file written by torch.save", f"a damaged file ({reason})")) from None
    if not isinstance(value, dict):
        raise BadFileError(Problem(path, "a dictionary of tensors", f"a {type(value).__name__}"))
    return value


def _refused(path: Path, error: Exception) -> str:
    reason = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "global" in line), "")
    return (
        f"one that needs code to be run, which is never done here ({reason or 'weights_only refused it'}). "
        f"Convert it: where you trust {path.name}, save its tensors alone with torch.save under the same name, "
        "then run `magi2 convert`, which writes safetensors"
    )
