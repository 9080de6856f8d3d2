"""SwiGLU7: a gate clamped above at 7 and a linear half clamped to ±7 and moved by one (10 §5, 50 §3.2)."""

from __future__ import annotations

from torch import Tensor

ALPHA = 1.702
LIMIT = 7.0


def swiglu7(x: Tensor) -> Tensor:
    """[..., 2·w] with gate in the even and linear in the odd channels -> [..., w]: fp32 inside, x's dtype outside."""
    return swiglu7_pair(x[..., 0::2].float(), x[..., 1::2].float()).to(x.dtype)


def swiglu7_pair(gate: Tensor, linear: Tensor) -> Tensor:
    """gate · sigmoid(1.702·gate) · (linear + 1) of two fp32 tensors of one shape, after the clamps (10 §5).

    The gate has no lower clamp. Returns fp32.
    """
    gate = gate.clamp(max=LIMIT)
    return (gate * ALPHA).sigmoid_().mul_(gate).mul_(linear.clamp(-LIMIT, LIMIT).add_(1))
