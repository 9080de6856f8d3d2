"""Measure how many bytes of tensor storage are alive at once, on any device and exactly (memory of kernels aside)."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class StoragePeak(TorchDispatchMode):
    """Counts the storages made while it is active; `peak` is the largest sum of those alive after an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out
