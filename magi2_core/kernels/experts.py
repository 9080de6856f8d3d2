"""The routed experts of one MoE head by torch's own operators (10 §9, 70 §3).

Routes are sorted by expert; a product is one grouped launch on CUDA and one matrix product for each expert elsewhere;
and the K contributions of a token are summed in fp32 in the order of its choices: repeatable, and rounded once.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dit.activation import swiglu7_pair

log = logging.getLogger("magi2")

# torch's grouped product: public since 2.10, and in 2.9 for all GPUs with bfloat16 too; 2.8 has it for Hopper alone.
GROUPED_MM: Any = getattr(F, "grouped_mm", getattr(torch, "_grouped_mm", None) if torch.__version__ >= "2.9" else None)

# Elements of one fp32 temporary of the activation: in cache on a CPU, 64 MiB elsewhere.
_ACTIVATION = {"cpu": 1 << 18}
_ACTIVATION_GPU = 1 << 24


def head_experts(
    x_Td: Tensor,
    weights_TK: Tensor,
    bank_TK: Tensor,
    w_gate_EdF: Tensor,
    w_up_EdF: Tensor,
    w_down_EFd: Tensor,
    *,
    shared: bool = False,
) -> Tensor:
    """Σ_k weight · expert(x) for every token of one head: [T, d] in x's dtype.

    bank_TK: which of the E experts given here; where the head is `shared` with another rank, E or more marks a route
    that is not evaluated here. The products of gate and up stay fp32 up to the activation, which is rounded to x's
    dtype, and the products of down stay fp32 up to the sum. The grouped product on CUDA rounds each of the three to
    bf16, which is the price of not reading the offsets back to the host.
    """
    tokens, k = bank_TK.shape
    order_R, ends_E = sort_routes(bank_TK.flatten(), w_gate_EdF.shape[0])
    x_Rd = x_Td.index_select(0, order_R // k)
    hidden_RF = _activate(_grouped(x_Rd, w_gate_EdF, ends_E), _grouped(x_Rd, w_up_EdF, ends_E), x_Td.dtype)
    y_Rd = _grouped(hidden_RF, w_down_EFd, ends_E).float()
    routes_R = torch.arange(len(order_R), device=order_R.device)
    if shared:  # rows past the last end were never written, and 0 · NaN is NaN
        y_Rd.masked_fill_((routes_R >= ends_E[-1])[:, None], 0.0)
    place_TK = torch.empty_like(order_R).scatter_(0, order_R, routes_R).view(tokens, k)
    return F.embedding_bag(place_TK, y_Rd, mode="sum", per_sample_weights=weights_TK).to(x_Td.dtype)


def sort_routes(bank_R: Tensor, banks: int) -> tuple[Tensor, Tensor]:
    """Order routes by bank, routes of one bank by their position: (order [R] int64, ends [banks] int32).

    `ends[b]` is one past the last sorted route of bank b. Routes of a bank that is not there (id `banks` or more) come
    last and are counted by no entry, so a rank that holds a part of a head's experts needs no count of its routes.
    """
    sorted_R, order_R = bank_R.sort(stable=True)
    ends = torch.searchsorted(sorted_R, torch.arange(banks, device=bank_R.device), right=True, out_int32=True)
    return order_R, ends


def _grouped(x_Ri: Tensor, w_Eio: Tensor, ends_E: Tensor) -> Tensor:
    """Rows [ends[e-1], ends[e]) times w[e] -> [R, o]; rows past the last end are undefined."""
    if runs_on_device(x_Ri.device.type, x_Ri.dtype, x_Ri.shape[1], w_Eio.shape[2]):
        return grouped_on_device(x_Ri, w_Eio, ends_E)
    return grouped_by_loop(x_Ri, w_Eio, ends_E)


def runs_on_device(device_type: str, dtype: torch.dtype, *widths: int) -> bool:
    """Whether grouped products of these widths are one launch, with results in `dtype`; otherwise they stay fp32."""
    if device_type != "cuda" or dtype != torch.bfloat16 or any(width % 8 for width in widths):
        return False
    if GROUPED_MM is None:
        _warn_of_old_torch()
    return GROUPED_MM is not None


@cache
def _warn_of_old_torch() -> None:
    log.warning(
        "torch %s has no grouped matrix product: the experts run one by one, which is much slower. Update torch to"
        " 2.9 or newer.", torch.__version__
    )  # fmt: skip


def grouped_on_device(x_Ri: Tensor, w_Eio: Tensor, ends_E: Tensor) -> Tensor:
    """One launch, rounded to x's dtype; the offsets stay on the device. Widths must be multiples of 16 bytes."""
    y_Ro: Tensor = GROUPED_MM(x_Ri, w_Eio, offs=ends_E)
    return y_Ro


def grouped_by_loop(x_Ri: Tensor, w_Eio: Tensor, ends_E: Tensor) -> Tensor:
    """One fp32 product for each group that has rows; reads the offsets back to the host, which costs a CPU nothing."""
    y_Ro = torch.empty((x_Ri.shape[0], w_Eio.shape[2]), dtype=torch.float32, device=x_Ri.device)
    start = 0
    for stop, w_io in zip(ends_E.tolist(), w_Eio, strict=True):
        if stop > start:
            torch.mm(x_Ri[start:stop].float(), w_io.float(), out=y_Ro[start:stop])
        start = stop
    return y_Ro


def activated_rows(device_type: str, width: int) -> int:
    """Rows of `width` that are activated at once."""
    return max(1, _ACTIVATION.get(device_type, _ACTIVATION_GPU) // width)


def _activate(gate_RF: Tensor, up_RF: Tensor, dtype: torch.dtype) -> Tensor:
    """The activation rounded to `dtype`, in the gate's own memory where that has this dtype."""
    hidden_RF = gate_RF if gate_RF.dtype == dtype else torch.empty_like(gate_RF, dtype=dtype)
    limit = activated_rows(gate_RF.device.type, gate_RF.shape[1])
    for start in range(0, gate_RF.shape[0], limit):
        rows = slice(start, start + limit)
        hidden_RF[rows] = swiglu7_pair(gate_RF[rows], up_RF[rows])
    return hidden_RF
