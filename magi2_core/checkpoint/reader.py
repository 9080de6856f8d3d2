"""Parts of tensors read from disk straight into the memory where they will stay."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from .index import Entry
from .problem import BadFileError, Problem
from .shard import Region, region_shape


class TensorReader(Protocol):
    """Reads regions of the tensors of one network; several threads may read at once."""

    bytes_read: int
    files_opened: int

    def read(self, key: str, region: Region, destination: Tensor) -> None:
        """Fill `destination`, a contiguous CPU tensor of the region's shape and the stored dtype."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class SafetensorsReader:
    """Reads from safetensors files, each opened once at its first tensor.

    Plain positioned reads instead of a memory map: the bytes land in the destination and nowhere else, so the peak of
    resident memory while loading is what was loaded, and only the rank's own bytes leave the disk (70 §7).
    """

    def __init__(self, entries: Mapping[str, Entry]):
        self._entries = entries
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.files_opened = 0

    def read(self, key: str, region: Region, destination: Tensor) -> None:
        """Fill `destination` (see TensorReader). Raises BadFileError if the file ends early or cannot be read."""
        entry = self._entries[key]
        if destination.dtype != entry.dtype or destination.shape != region_shape(region):
            raise ValueError(f"{key}: the destination is {destination.dtype} {tuple(destination.shape)}")
        if destination.numel() == 0:
            return
        target = destination.view(-1).view(torch.uint8).numpy().data
        done = 0
        try:
            file = self._open(entry.file)
            for offset, length in _runs(entry, region):
                _read_exactly(file, target[done : done + length], entry.begin + offset, entry)
                done += length
        except OSError as error:
            raise BadFileError(Problem(entry.file, "a readable file", f"{error.strerror}", key)) from error
        with self._lock:
            self.bytes_read += done

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self.files_opened += 1
            return self._files[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class TensorsReader:
    """Reads from tensors that are already there: those of a memory-mapped pickle (40 §3.1)."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.files_opened = 1

    def read(self, key: str, region: Region, destination: Tensor) -> None:
        """Fill `destination` (see TensorReader)."""
        destination.copy_(self._tensors[key][region])
        with self._lock:
            self.bytes_read += destination.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._tensors.clear()  # lets go of the map


def _runs(entry: Entry, region: Region) -> Iterator[tuple[int, int]]:
    """The contiguous pieces of a region as (byte offset in the tensor, bytes), in order."""
    outer = len(entry.shape)
    run = 1
    while outer > 0 and region_shape(region)[outer:] == entry.shape[outer:]:
        outer -= 1
        run *= region_shape(region)[outer]
    strides = [math.prod(entry.shape[axis + 1 :]) for axis in range(len(entry.shape))]
    inner = sum(region[axis].start * strides[axis] for axis in range(outer, len(entry.shape)))
    for position in itertools.product(*(range(part.start, part.stop) for part in region[:outer])):
        offset = inner + sum(index * stride for index, stride in zip(position, strides, strict=False))
        yield offset * entry.dtype.itemsize, run * entry.dtype.itemsize


def _read_exactly(file: int, target: memoryview, offset: int, entry: Entry) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file, [target[done:]], offset + done)
        if count == 0:
            size = os.fstat(file).st_size
            raise BadFileError(Problem(entry.file, f"{offset + len(target)} bytes", f"{size} bytes: cut while in use"))
        done += count
