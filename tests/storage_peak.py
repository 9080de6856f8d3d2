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
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps an address from being reused
        self._total = 0  # bytes of the known ones, of which some may have gone

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._total += storage.nbytes()
        if self._total > self.peak:  # looking for those that have gone is slow, and before this changes nothing
            self._known = {key: value for key, value in self._known.items() if not value[0].expired()}
            self._total = sum(size for _, size in self._known.values())
            self.peak = max(self.peak, self._total)
        return out
