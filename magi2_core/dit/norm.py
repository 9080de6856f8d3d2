"""RMSNorm whose stored weight is an offset from one (10 §5, 50 §3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .runs import MODALITIES, Run, block

EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, runs: Sequence[Run] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise the last dim in fp32: x · rsqrt(mean x² + 1e-6) · (weight + 1), rounded once to `dtype`.

    x [rows, ..., dim], any float dtype; weight fp32 [dim], or [3·dim] when `runs` says which rows are of which
    modality. The result has x's shape, and x's dtype unless `dtype` is given. [rows, heads, d] with weight [d] is the
    norm of each head by itself (10 §5).
    """
    dtype = dtype or x.dtype
    if runs is None:
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1, EPS).to(dtype)
    y = torch.empty_like(x, dtype=dtype)
    for run in runs:
        y[run.rows] = rms_norm(x[run.rows], block(weight, run.modality, MODALITIES), dtype=dtype)
    return y
