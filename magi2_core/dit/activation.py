"""SwiGLU7: a gate clamped above at 7 and a linear half clamped to ±7 and moved by one (10 §5, 50 §3.2)."""

from __future__ import annotations

from torch import Tensor

ALPHA = 1.702
LIMIT = 7.0


def swiglu7(x: Tensor) -> Tensor:
    """[..., 2·w] with gate in the even and linear in the odd channels -> [..., w]: fp32 inside, x's dtype outside."""
    return swiglu7_pair(x[..., 0::2], x[..., 1::2]).to(x.dtype)


def swiglu7_pair(gate: Tensor, linear: Tensor) -> Tensor:
    """gate · sigmoid(1.702·gate) · (linear + 1) of two tensors of one shape, after the clamps (10 §5).

    The gate has no lower clamp. fp32 inside and out; the limits are exact in bf16, so clamping first changes nothing,
    and no more than two fp32 tensors exist at once.
    """
    gate = gate.clamp(max=LIMIT).float()
    hidden = (gate * ALPHA).sigmoid_().mul_(gate)
    del gate
    return hidden.mul_(linear.clamp(-LIMIT, LIMIT).float().add_(1))
