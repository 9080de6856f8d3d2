"""Linear maps with one weight block for each modality, and the guard that keeps fp32 products fp32 (10 §0, §5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .runs import MODALITIES, Run, block


def grouped_linear(x: Tensor, weight: Tensor, runs: Sequence[Run] | None = None, bias: Tensor | None = None) -> Tensor:
    """x @ weightᵀ + bias, accumulated in fp32 and rounded once to x's dtype.

    x [rows, in]; weight [out, in], or [3·out, in] when `runs` says which rows are of which modality; bias likewise.
    Returns [rows, out]. A modality without rows costs nothing (10 §5).
    """
    if runs is None:
        return F.linear(x, weight, bias)
    y = x.new_empty(x.shape[0], weight.shape[0] // MODALITIES)
    for run in runs:
        part = None if bias is None else block(bias, run.modality, MODALITIES)
        y[run.rows] = F.linear(x[run.rows], block(weight, run.modality, MODALITIES), part)
    return y


@contextmanager
def true_fp32() -> Iterator[None]:
    """Multiply fp32 matrices in fp32 inside the block, whatever the process has allowed, then restore its choice.

    The embedders, the stream projections, the router and the final linears are fp32 in the full sense: TF32 or bf16
    inside them moves routes (10 §0). Torch only has process-wide switches, so they are turned for the time of one
    forward and turned back, also after an exception.
    """
    backends: Any = torch.backends
    value: Any
    switches, name, value = [backends.cuda.matmul, backends.mkldnn.matmul], "fp32_precision", "ieee"
    if not all(hasattr(switch, name) for switch in switches):  # torch before 2.9
        switches, name, value = [backends.cuda.matmul], "allow_tf32", False
    saved = [getattr(switch, name) for switch in switches]
    try:
        for switch in switches:
            setattr(switch, name, value)
        yield
    finally:
        for switch, before in zip(switches, saved, strict=True):
            setattr(switch, name, before)
