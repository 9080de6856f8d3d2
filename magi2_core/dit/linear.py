"""Linear maps with one weight block for each modality (10 §5)."""

from __future__ import annotations

from collections.abc import Sequence

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
