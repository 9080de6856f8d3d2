"""Messages among ranks on several hosts, over gloo: JSON and tensors, never a pickle (80 §30)."""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .tree import decode, encode
from .worker import NO_LIMIT

Message = dict[str, Any]


class Mail:
    """What rank 0 says to all, what all say to each other, and a line between rank 0 and each other rank.

    The lines have a group of their own, so that they can be used at any time, by any thread, whatever the ranks do.
    """

    def __init__(self) -> None:
        """Every rank makes one at the same time, after torch.distributed is up."""
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self._group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._lines: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        self._telling = threading.Lock()

    def share(self, message: Message | None) -> Message:
        """Rank 0's message, of plain values and tensors, on every rank."""
        if self.rank == 0:
            assert message is not None
            tensors: list[Tensor] = []

            def set_aside(tensor: Tensor) -> list[Any]:
                tensors.append(tensor.cpu().contiguous())
                return []

            text = json.dumps(encode(message, set_aside)).encode()
            self._broadcast(torch.tensor([len(text)]))
            self._broadcast(_bytes(text))
            for tensor in tensors:
                self._broadcast(tensor)
            return message
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        data = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        received: Message = decode(
            json.loads(data.numpy().tobytes()), lambda _, dtype, shape: self._broadcast(torch.empty(shape, dtype=dtype))
        )
        return received

    def _broadcast(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0, group=self._group)
        return tensor

    def gather(self, message: Message) -> list[Message]:
        """Every rank's message, of plain values, on every rank."""
        text = json.dumps(message).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks)]
        dist.all_gather(sizes, torch.tensor([len(text)]), group=self._group)
        room = max(int(size) for size in sizes)
        texts = [torch.empty(room, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(texts, _bytes(text.ljust(room)), group=self._group)
        return [json.loads(data.numpy().tobytes()) for data in texts]

    def tell(self, rank: int, message: Message) -> None:
        """Send plain values over the line to `rank`; one of the two is rank 0."""
        text = json.dumps(message).encode()
        with self._telling:
            dist.send(torch.tensor([len(text)]), rank, group=self._lines)
            dist.send(_bytes(text), rank, group=self._lines)

    def hear(self, rank: int) -> Message:
        """The next message over the line from `rank`; RuntimeError when that rank is gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank, group=self._lines)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, rank, group=self._lines)
        message: Message = json.loads(text.numpy().tobytes())
        return message


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
