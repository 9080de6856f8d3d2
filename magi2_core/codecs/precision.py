"""True fp32 arithmetic for the codecs that are specified in fp32 (40 §3.8, trap 12)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def true_float32() -> Iterator[None]:
    """Run fp32 convolutions and products in full fp32, not TF32, inside the block; the setting is put back after it.

    PyTorch lets cuDNN convolutions round fp32 inputs to TF32 (10 bits) by default, on NVIDIA devices alone.
    """
    switches = _switches()
    before = [getattr(place, name) for place, name, _ in switches]
    try:
        for place, name, full in switches:
            setattr(place, name, full)
        yield
    finally:
        for (place, name, _), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def _switches() -> list[tuple[Any, str, Any]]:
    """The TF32 settings that are on, as (object, attribute, value for full fp32)."""
    convolution: Any = torch.backends.cudnn  # typed loosely: its `conv` came with torch 2.9
    product = torch.backends.cuda.matmul
    try:
        return [(place, "allow_tf32", False) for place in (convolution, product) if place.allow_tf32]
    except RuntimeError:  # torch refuses to read these once somebody has set the newer names for each operator
        return [(place, "fp32_precision", "ieee") for place in (convolution.conv, product)]
