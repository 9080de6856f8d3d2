"""The values that cross between processes, as a tree that JSON can hold and tensors beside it (60 §6.6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Put = Callable[[Tensor], list[int]]  # keeps a tensor's bytes somewhere; returns their place
Get = Callable[[list[int], torch.dtype, list[int]], Tensor]  # from a place, dtype and shape to the tensor


class TransportError(RuntimeError):
    """A value that cannot cross between processes, or a channel that broke in the middle of a message."""


def encode(value: Any, put: Put, where: str = "") -> Any:
    """Turn None, bool, int, float, str, bytes, list, tuple, dict and tensors into what JSON can hold, in order.

    A dict with one key that begins with $ marks everything that JSON lacks. Raises TransportError, naming the place,
    for a value of another type.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise TransportError(
                f"{where.lstrip('.')} is a {value.layout} tensor on {value.device}; only dense tensors can cross."
            )
        return {"$tensor": [put(value), str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, (bytes, bytearray)):
        data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return {"$bytes": [put(data), len(value)]}
    if isinstance(value, (list, tuple)):
        items = [encode(item, put, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, put, f"{where}.{key}") for key, item in value.items()}
        pairs = [[encode(key, put, where), encode(item, put, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"$dict": pairs}
    raise TransportError(
        f"{where.lstrip('.') or 'The message'} is a {type(value).__name__}, which cannot cross between processes; "
        "give None, bool, int, float, str, bytes, list, tuple, dict or a tensor."
    )


def decode(tree: Any, get: Get) -> Any:
    """The value that `encode` was given; tensors are asked for in the order in which they were put."""
    if isinstance(tree, list):
        return [decode(item, get) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((mark, content),) = tree.items()
        if mark == "$tensor":
            place, dtype, shape = content
            return get(place, getattr(torch, dtype), shape)
        if mark == "$bytes":
            place, size = content
            return get(place, torch.uint8, [size]).numpy().tobytes()
        if mark == "$tuple":
            return tuple(decode(item, get) for item in content)
        if mark == "$dict":
            return {decode(key, get): decode(item, get) for key, item in content}
    return {key: decode(item, get) for key, item in tree.items()}
