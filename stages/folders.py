"""Where checkpoints are found and where latents go; names from a workflow resolve inside these folders only."""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..magi2_core.errors import RequestError

LONGEST_NAME = 200  # bytes; file systems take 255, and a number, the suffix and a temporary name's ending come to it


@dataclass(frozen=True)
class Folders:
    """checkpoints: registered folders, searched in this order. output, input: where files go and come from.

    user: the user's own texts and settings, None if there are none. temp: for files that a later node reads.
    """

    checkpoints: tuple[Path, ...]
    output: Path
    input: Path
    user: Path | None = None
    temp: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))


def checkpoint_names(files: Iterable[str]) -> list[str]:
    """Names of the checkpoints among files given relative to a registered folder, as 'folder' or 'outer/folder'.

    A checkpoint is a folder with `preview/*.safetensors.index.json` in it (60 §7), or a single safetensors file there.
    """
    names = set()
    for file in files:
        path = PurePosixPath(file.replace("\\", "/"))
        if path.parent.name == "preview" and path.name.endswith((".safetensors.index.json", ".safetensors")):
            names.add(str(path.parent.parent))
    return sorted(names)


def find_checkpoints(folders: Folders) -> list[str]:
    """The names of all checkpoints in the registered folders."""
    files = (
        Path(folder, name).relative_to(root).as_posix()
        for root in folders.checkpoints
        for folder, _, names in os.walk(root, followlinks=True)  # checkpoints are often links to a large disk
        for name in names
    )
    return checkpoint_names(files)


def resolve_checkpoint(name: str, folders: Folders) -> Path:
    """The folder of a checkpoint given by name, or by an absolute path inside a registered folder (60 §7).

    Raises RequestError that names the folders searched and what was found there.
    """
    relative = _relative(name, "checkpoint")
    for root in folders.checkpoints:
        path = Path(relative) if Path(relative).is_absolute() else root / relative
        if relative and _inside(path, root) and os.path.isdir(path):  # not Path.is_dir: False for too long a name
            return path
    found = ", ".join(find_checkpoints(folders)) or "none"
    searched = " and ".join(str(root) for root in folders.checkpoints)
    if found == ".":
        raise RequestError(f"{searched} is a checkpoint itself; name the folder around it, and it as the checkpoint.")
    raise RequestError(
        f"There is no checkpoint {name!r} in {searched}. Found there: {found}. Choose one of these, or put the MAGI-2"
        " Preview files into a folder of that name (the one that holds preview/, text_encoder/, turbo_vae/, ...)."
    )


def checkpoint_name(path: Path, folders: Folders) -> str:
    """The name of a checkpoint's folder, which tells nothing of where the registered folder is."""
    return next(path.relative_to(root).as_posix() for root in folders.checkpoints if path.is_relative_to(root))


def resolve_inside(name: str, roots: Sequence[Path], what: str) -> Path:
    """The existing file `name` below one of `roots`; RequestError if it is not there or leaves them (80 line 20)."""
    relative = _relative(name, what)
    for root in roots:
        path = root / relative
        if relative and _inside(path, root) and os.path.isfile(path):
            return path
    searched = " or ".join(str(root) for root in roots)
    raise RequestError(f"There is no {what} {name!r} in {searched}.")


def check_prefix(filename_prefix: str) -> Path:
    """The start of a file's name below the output folder; RequestError for one that leaves it (80 line 20)."""
    relative = Path(filename_prefix.strip().replace("\\", "/"))
    inside = not relative.is_absolute() and ".." not in relative.parts and relative.name
    if not inside:
        raise RequestError(f"The file name prefix {filename_prefix!r} names no file below the output folder.")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in filename_prefix):
        raise RequestError(f"The file name prefix {filename_prefix!r} has characters that no file's name can have.")
    if max(len(os.fsencode(part)) for part in relative.parts) > LONGEST_NAME:
        raise RequestError(f"The file name prefix {filename_prefix!r} is longer than {LONGEST_NAME} bytes.")
    return relative


def _relative(name: str, what: str) -> str:
    if not isinstance(name, str):  # ComfyUI passes on what a prompt's JSON has
        raise RequestError(f"The name of the {what} is {name!r}; it must be text.")
    return name.strip().replace("\\", "/")


def _inside(path: Path, root: Path) -> bool:
    """Whether `path` stays below `root` by its name alone: links inside a folder the user registered are followed."""
    parts = path.parts
    return ".." not in parts and parts[: len(root.parts)] == root.parts
