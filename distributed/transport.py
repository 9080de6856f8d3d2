"""Messages between processes: plain values as JSON, tensors as anonymous files; nothing is pickled (80 §30, 60 §6.7).

A message is a tree of None, bool, int, float, str, bytes, list, tuple, dict and tensors. It crosses one Unix-domain
socket. Everything of 64 kB or more travels as an open descriptor of a file that never had a name (`memfd_create`; where
that is missing, an unlinked file in the temporary folder): the sender writes the bytes once, the receiver maps them.

- The bytes are copied once, and never through the socket: a message takes less than 64 kB of it, so that sending to a
  process that is waiting never blocks.
- Nothing can be left behind, whoever is killed when: the kernel frees the file with its last descriptor.
- /dev/shm is not used, so its size (64 MB in a default container) does not matter: the limit is the machine's memory.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Iterable, Iterator
from functools import partial
from math import prod
from multiprocessing.connection import wait
from typing import Any

import torch
from torch import Tensor

from .tree import TransportError, decode, encode

INLINE_BYTES = 1 << 16
_COPY_BYTES = 1 << 26
_MOST_FILES = 250  # the kernel passes at most 253 descriptors at once
_HEAD = struct.Struct("<QQII")  # bytes of JSON, bytes of small blobs, descriptors, 1 if both stand in the last of them


class Packed:
    """A message ready to be sent, once or to several receivers; it holds open files until `close`."""

    def __init__(self, value: Any) -> None:
        """Copy `value`'s tensors into anonymous files; raises TransportError for a value of another type."""
        self._small = bytearray()
        self.files: list[int] = []
        self._body_in_file = 0
        try:
            text = json.dumps(encode(value, self._put)).encode()
            self.body = text + self._small
            self._lengths = len(text), len(self._small)
            if len(self.body) >= INLINE_BYTES:
                self._add_file([memoryview(self.body)])
                self.body, self._body_in_file = b"", 1
            if len(self.files) > _MOST_FILES:
                raise TransportError(
                    f"A message holds {len(self.files)} tensors of {INLINE_BYTES} bytes or more; at most "
                    f"{_MOST_FILES} fit. Concatenate some of them."
                )
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> bytes:
        return _HEAD.pack(*self._lengths, len(self.files), self._body_in_file)

    def close(self) -> None:
        while self.files:
            os.close(self.files.pop())

    def _put(self, tensor: Tensor) -> list[int]:
        """Keep a tensor's bytes; returns their place: [file or -1, offset, bytes]."""
        if tensor.nbytes >= INLINE_BYTES:
            self._add_file(_blocks(tensor))
            return [len(self.files) - 1, 0, tensor.nbytes]
        self._small += bytes(-len(self._small) % 16)  # any dtype may start here
        offset = len(self._small)
        for block in _blocks(tensor):
            self._small += block
        return [-1, offset, tensor.nbytes]

    def _add_file(self, blocks: Iterable[memoryview]) -> None:
        file = anonymous_file()
        self.files.append(file)
        for block in blocks:
            done = 0
            while done < block.nbytes:  # one write moves at most 2 GB
                try:
                    done += os.write(file, block[done:])
                except OSError as error:
                    raise TransportError(
                        f"{block.nbytes} bytes could not be handed over between processes: {error.strerror}. "
                        "Free memory, or ask for a smaller or shorter clip."
                    ) from error


def _blocks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, in C order; from a device block by block, so that the host holds no second copy."""
    if tensor.numel():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        step = flat.numel() if flat.device.type == "cpu" else _COPY_BYTES
        for first in range(0, flat.numel(), step):
            yield flat[first : first + step].cpu().numpy().data


def anonymous_file() -> int:
    """A descriptor of an empty file that has no name anywhere and vanishes with its last descriptor."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("magi2", os.MFD_CLOEXEC)
        except OSError:  # forbidden by the container: a file on disk serves as well, only slower
            pass
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Channel:
    """One end of a connection that carries messages both ways; any thread may send, one thread receives.

    `private`: received tensors are copies on write, for a message that several processes map at the same time.
    Otherwise the receiver owns the memory alone.
    """

    def __init__(self, connection: socket.socket, *, private: bool = False) -> None:
        self._socket = connection
        self._private = private
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def ready(self) -> bool:
        """Whether `receive` has something to do, which may be to raise EOFError."""
        return bool(wait([self._socket], 0))

    def send(self, message: Any) -> None:
        """Send a tree of plain values and tensors, or a `Packed` one; raises OSError if the other end is gone."""
        packed = message if isinstance(message, Packed) else Packed(message)
        try:
            data = packed.head + packed.body
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", packed.files))] if packed.files else []
            with self._sending:
                sent = self._socket.sendmsg([data], rights)
                self._socket.sendall(memoryview(data)[sent:])
        finally:
            if packed is not message:
                packed.close()

    def receive(self) -> Any:
        """The next message; waits for it. Raises EOFError when the other end is closed or its process gone."""
        files = array.array("i")
        try:
            head = self._read_head(files)
            text_size, small_size, expected, body_in_file = _HEAD.unpack(head)
            if len(files) != expected:
                raise TransportError(
                    f"A message came with {len(files)} of its {expected} open files: this process has too many open; "
                    "raise its limit (ulimit -n)."
                )
            size = text_size + small_size
            body = memoryview(_map(files[-1], size, private=True) if body_in_file else self._read(size))
            small = body[text_size:]
            return decode(json.loads(bytes(body[:text_size])), partial(_tensor, small, files, self._private))
        except ConnectionError as error:
            raise EOFError("The other end of the channel is gone.") from error
        finally:
            for file in files:
                os.close(file)

    def _read_head(self, files: array.array[int]) -> bytes:
        space = socket.CMSG_SPACE((_MOST_FILES + 1) * files.itemsize)
        head, ancillary, _, _ = self._socket.recvmsg(_HEAD.size, space, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
        if not head:
            raise EOFError("The other end of the channel is closed.")
        return head + bytes(self._read(_HEAD.size - len(head)))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError("The channel closed in the middle of a message.")
            view = view[count:]
        return data


def _map(file: int, size: int, private: bool) -> mmap.mmap:
    if os.fstat(file).st_size < size:  # touching a page past the end would kill the process
        raise TransportError(f"A message's file holds {os.fstat(file).st_size} bytes instead of {size}.")
    return mmap.mmap(file, size, flags=mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)


def _tensor(
    small: memoryview, files: array.array[int], private: bool, place: list[int], dtype: torch.dtype, shape: list[int]
) -> Tensor:
    """The tensor at a place, in writable memory of its own."""
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    file, offset, size = place
    memory = bytearray(small[offset : offset + size]) if file < 0 else _map(files[file], size, private)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
