"""Attention over segments with its log-sum-exp, by the fastest kernel that torch has for the device.

`varlen_attention` is the one dispatch point. `explicit_attention` is the plain definition that every kernel must equal,
and what runs where no kernel does: with soft-capping, and on devices without one (70 §4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# q [G, R, Lq, d] with k, v [G, R, Lk, d] -> out [G, R, Lq, d], lse [G, R, Lq] fp32 natural logarithm.
Kernel = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]

_SCORES = 1 << 25
"""Scores held at once by the explicit path: 128 MiB in fp32."""


def varlen_attention(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cu_seqlens: Sequence[int], *, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Full softmax attention inside each segment of a packed sequence.

    q [T, H, d], k and v [T, Hk, d], any strides, fp32 or bf16; query head h uses key head h // (H/Hk). `cu_seqlens`
    are the segment boundaries; empty segments are legal, rows in no segment are undefined. softcap c > 0 replaces
    scores z by c·tanh(z/c); 0 or less is off (10 §7). Returns out [T, H, d] in q's dtype and lse [H, T] fp32.
    """
    tokens, heads, width = q_THd.shape
    kv_heads = k_THd.shape[1]
    kernel = _choose(q_THd, softcap)
    out_THd = torch.empty((tokens, heads, width), dtype=q_THd.dtype, device=q_THd.device)
    lse_HT = torch.empty((heads, tokens), dtype=torch.float32, device=q_THd.device)
    for start, stop in pairwise(cu_seqlens):
        if start == stop or not heads:
            continue
        q = q_THd[start:stop].unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
        # Each key head serves its group of query heads by a stride of 0: nothing is copied.
        k, v = (x[start:stop].transpose(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for x in (k_THd, v_THd))
        out, lse = kernel(q, k, v, scale)
        out_THd[start:stop].unflatten(1, q.shape[:2]).permute(1, 2, 0, 3).copy_(out)
        lse_HT[:, start:stop] = lse.flatten(0, 1)
        del out, lse  # before the next segment's
    return out_THd, lse_HT


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """The definition, in fp32, some query rows at a time; the output is rounded once to q's dtype."""
    k32, v32 = k.float(), v.float()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    rows = explicit_rows(q.shape[0] * q.shape[1], k.shape[2])
    for start in range(0, q.shape[2], rows):
        part = slice(start, start + rows)
        scores = (q[:, :, part].float() @ k32.transpose(2, 3)).mul_(scale)
        if softcap > 0:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        lse[:, :, part] = scores.logsumexp(-1)
        out[:, :, part] = scores.sub_(lse[:, :, part, None]).exp_() @ v32
    return out, lse


def explicit_rows(heads: int, keys: int) -> int:
    """Query rows of which the explicit path holds the scores at once."""
    return max(1, _SCORES // (heads * keys))


def _choose(q: Tensor, softcap: float) -> Kernel:
    if softcap > 0:
        return lambda q, k, v, scale: explicit_attention(q, k, v, scale, softcap)
    if q.device.type == "cpu":
        return _cpu_flash
    if q.device.type == "cuda":
        new = torch.cuda.get_device_capability(q.device) >= (8, 0)
        return _cuda_flash if new and q.dtype == torch.bfloat16 else _cuda_efficient
    return explicit_attention


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    # fp32 inside: faster than this kernel's bf16 form, and it keeps the probabilities unrounded.
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.float(), k.float(), v.float(), 0.0, False, scale=scale
    )
    return out.to(q.dtype), lse


def _cuda_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return out, lse


def _cuda_efficient(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, False, scale=scale)
    return out, lse[..., : q.shape[2]]  # this kernel pads the rows of its log-sum-exp
