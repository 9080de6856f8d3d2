"""Safetensors files and folders read by their headers alone: which tensor lies where, and what is wrong.

The headers are read here rather than through the safetensors library because the library memory-maps a file before it
can say anything: mapped pages count as resident memory, and a damaged file gets one exception without key or sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from .problem import BadFileError, Problem
from .spec import TensorSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# The library's own limit; a longer header is a damaged file, not a large model.
_HEADER_LIMIT = 100_000_000

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Entry:
    """A tensor on disk: its file, dtype and shape, and the byte of the file where its data begins."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class Scan:
    """What a folder of safetensors holds; `listed` are the keys that it names, also those that cannot be read."""

    source: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def read_header(path: Path) -> dict[str, Entry]:
    """Read the header of one safetensors file and check it against the file's size, without touching the data.

    Raises BadFileError for a missing, empty, cut or foreign file and for a header that does not describe it.
    """
    header, data_begin, file_size = _header_bytes(path)
    try:
        described = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "a JSON header", f"bytes that are not JSON ({error})") from None
    if not isinstance(described, dict):
        raise _bad(path, "a JSON object as header", f"a JSON {type(described).__name__}")
    described.pop("__metadata__", None)
    entries = {key: _entry(path, key, value, data_begin) for key, value in described.items()}
    position = data_begin
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].nbytes)):
        if entry.begin != position:
            raise _bad(path, f"its data at byte {position}", f"byte {entry.begin}: data overlap or leave a gap", key)
        position += entry.nbytes
    if position != file_size:
        cut = "the file was cut short" if file_size < position else "the file has bytes that no tensor owns"
        raise _bad(path, f"{position} bytes as its header says", f"{file_size} bytes: {cut}")
    return entries


def scan_file(path: Path) -> Scan:
    """Scan a single safetensors file; a file that cannot be read is a problem of the result."""
    scan = Scan(path)
    try:
        scan.entries = read_header(path)
    except BadFileError as error:
        scan.problems.append(error.problem)
    scan.listed = set(scan.entries)
    return scan


def scan_folder(folder: Path) -> Scan:
    """Scan a folder that holds `model.safetensors.index.json` with its shards, or `model.safetensors` (10 §12.2)."""
    index = folder / INDEX_NAME
    if index.exists() or index.is_symlink():
        return _scan_shards(folder, index)
    if (folder / SINGLE_NAME).exists():
        return scan_file(folder / SINGLE_NAME)
    found = "neither file" if folder.is_dir() else "no such folder"
    return Scan(folder, problems=[Problem(folder, f"{INDEX_NAME} or {SINGLE_NAME}", found)])


def compare(scan: Scan, table: Mapping[str, TensorSpec], optional: Collection[str] = ()) -> list[Problem]:
    """Compare what was scanned with what the model needs: missing, misshapen and stray keys, and dtypes.

    Keys in `optional` may be missing. A key that the index names but whose file is damaged is not reported again.
    """
    problems = []
    for key, spec in table.items():
        entry = scan.entries.get(key)
        if entry is None:
            if key not in scan.listed and key not in optional and not _whole_file_is_bad(scan):
                problems.append(Problem(scan.source, _describe(spec.shape), "no such key", key))
        elif entry.shape != spec.shape:
            problems.append(Problem(entry.file, f"shape {list(spec.shape)}", f"shape {list(entry.shape)}", key))
        elif not entry.dtype.is_floating_point:
            problems.append(Problem(entry.file, "floating-point values", str(entry.dtype), key))
    for key in sorted(scan.entries.keys() - table.keys()):
        problems.append(
            Problem(scan.entries[key].file, "no key that the model lacks", "a stray key", key, warning=True)
        )
    return problems


def git_lfs_pointer(path: Path) -> Problem | None:
    """The problem of a file that is a git-lfs pointer in place of the file itself, or None."""
    with path.open("rb") as file:
        text = file.read(200)
    if not text.startswith(b"version https://git-lfs"):
        return None
    sizes = [line[5:].decode("ascii", "replace") for line in text.splitlines() if line.startswith(b"size ")]
    size = f" of {sizes[0]} bytes" if sizes else ""
    return Problem(path, "the file itself", f"a git-lfs pointer to a file{size}: run `git lfs pull` in its repository")


def existing_file(path: Path) -> int:
    """Size of a file in bytes; raises BadFileError if it is missing, unreadable, empty or a git-lfs pointer."""
    try:
        if not path.is_file():
            found = "something else than a file" if path.exists() else "no such file"
            raise _bad(path, "a file", found)
        size = path.stat().st_size
        if size == 0:
            raise _bad(path, "a file with data", "an empty file")
        if pointer := git_lfs_pointer(path):
            raise BadFileError(pointer)
    except OSError as error:
        raise _bad(path, "a readable file", f"{error.strerror}") from None
    return size


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; raises BadFileError."""
    existing_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise _bad(path, "a JSON object", f"text that is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise _bad(path, "a JSON object", f"a JSON {type(value).__name__}")
    return value


def _header_bytes(path: Path) -> tuple[bytes, int, int]:
    """The header's bytes, the byte where the data begin, and the size of the file."""
    size = existing_file(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise _bad(
                path, f"a safetensors header within the file's {size} bytes", f"a header that claims {length} bytes"
            )
        return file.read(length), 8 + length, size


def _entry(path: Path, key: str, value: Any, data_begin: int) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
            raise ValueError
        shape, known = tuple(shape), dtype in DTYPES
    except (KeyError, TypeError, ValueError):
        raise _bad(path, "dtype, shape and data_offsets in the header", repr(value)[:120], key) from None
    if not known:
        raise _bad(path, f"a dtype of {', '.join(DTYPES)}", repr(dtype), key)
    entry = Entry(path, DTYPES[dtype], shape, data_begin + begin)
    if entry.nbytes != end - begin:
        raise _bad(path, f"{entry.nbytes} bytes for {dtype} {list(shape)}", f"{end - begin} bytes", key)
    return entry


def _scan_shards(folder: Path, index: Path) -> Scan:
    scan = Scan(index)
    try:
        weight_map = read_json(index).get("weight_map")
    except BadFileError as error:
        scan.problems.append(error.problem)
        return scan
    if not isinstance(weight_map, dict) or not weight_map:
        scan.problems.append(Problem(index, "a weight_map from keys to files", repr(weight_map)[:120], "weight_map"))
        return scan
    scan.listed = set(weight_map)
    keys_of: dict[str, list[str]] = {}
    for key, name in weight_map.items():
        if _stays_inside(name):
            keys_of.setdefault(name, []).append(key)
        else:
            scan.problems.append(Problem(index, "the name of a file inside the folder", repr(name), key))
    for name, keys in keys_of.items():
        _scan_shard(scan, folder / name, keys)
    return scan


def _scan_shard(scan: Scan, shard: Path, keys: list[str]) -> None:
    try:
        header = read_header(shard)
    except BadFileError as error:
        scan.problems.append(error.problem)
        return
    for key in keys:
        if key in header:
            scan.entries[key] = header[key]
        else:
            scan.problems.append(Problem(shard, "the tensor that the index places here", "no such key", key))
    for key in sorted(header.keys() - scan.listed):
        scan.problems.append(Problem(shard, "only keys that the index names", "a stray key", key, warning=True))


def _stays_inside(name: Any) -> bool:
    """Whether a file name of an index stays in its folder (80, line 18). Symbolic links are the user's own choice."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and not PureWindowsPath(name).drive


def _whole_file_is_bad(scan: Scan) -> bool:
    """Whether nothing at all could be read, so that listing every key as missing would say nothing new."""
    return not scan.listed and any(not problem.warning for problem in scan.problems)


def _describe(shape: tuple[int, ...]) -> str:
    return f"a tensor of shape {list(shape)}"


def _bad(path: Path, expected: str, found: str, key: str | None = None) -> BadFileError:
    return BadFileError(Problem(path, expected, found, key))
