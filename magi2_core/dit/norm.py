"""RMSNorm whose stored weight is an offset from one (10 §5, 50 §3.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def rms_norm(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise the last dim in fp32: x · rsqrt(mean x² + 1e-6) · (weight + 1), rounded once to `dtype`.

    x [rows, ..., dim], any float dtype; weight fp32 [dim]. The result has x's shape, and x's dtype unless `dtype` is
    given. [rows, heads, d] with weight [d] is the norm of each head by itself (10 §5).
    """
    return F.rms_norm(x.float(), weight.shape, weight.float() + 1, EPS).to(dtype or x.dtype)
