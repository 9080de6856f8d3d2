"""The guard that keeps fp32 arithmetic fp32 (10 §0, 40 §3.8)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def true_fp32() -> Iterator[None]:
    """Multiply and convolve fp32 in fp32 inside the block, whatever the process has allowed, then restore its choice.

    TF32 or bf16 inside the router and the stream projections moves routes (10 §0), and by default NVIDIA devices round
    the inputs of fp32 convolutions to TF32 (40 trap 12). Torch only has process-wide switches, so they are turned for
    the time of one forward and turned back, also after an exception.
    """
    backends: Any = torch.backends
    value: Any
    places, name, value = [backends.cuda.matmul, backends.cudnn], "allow_tf32", False
    if hasattr(backends.cuda.matmul, "fp32_precision"):  # torch 2.9 and later
        places = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
        name, value = "fp32_precision", "ieee"
    saved = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, value)
        yield
    finally:
        for place, before in zip(places, saved, strict=True):
            setattr(place, name, before)
