"""Which experts each (token, MoE head) pair uses, how much, and the order in which they are evaluated (10 §9)."""

from __future__ import annotations

import torch
from torch import Tensor

NORM_EPS = 1e-12


def route(
    logits_SE: Tensor, bias_E: Tensor, top_k: int, *, normalize: bool = True, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts from fp32 logits [..., tokens, E] -> weights fp32 and expert ids int64, [..., tokens, K].

    The bias moves the selection only: experts are chosen, in descending order, by sigmoid(logit) + bias, and weighed
    by the sigmoid alone, normalised to a sum of 1 where `normalize`, times `scale` (10 §14.6). bias broadcasts to the
    logits.
    """
    score_SE = logits_SE.sigmoid()
    experts_SK = (score_SE + bias_E).topk(top_k, dim=-1).indices
    weights_SK = score_SE.gather(-1, experts_SK)
    if normalize:
        weights_SK = weights_SK / weights_SK.abs().sum(-1, keepdim=True).clamp(min=NORM_EPS)
    return weights_SK * scale, experts_SK


def sort_routes(bank_R: Tensor, banks: int) -> tuple[Tensor, Tensor]:
    """Order routes by bank, routes of one bank by their position: (order [R] int64, ends [banks] int32).

    `ends[b]` is one past the last sorted route of bank b. Routes of a bank that is not there (id `banks` or more) come
    last and are counted by no entry, so a rank that holds a part of a head's experts needs no count of its routes.
    """
    sorted_R, order_R = bank_R.sort(stable=True)
    ends = torch.searchsorted(sorted_R, torch.arange(banks, device=bank_R.device), right=True, out_int32=True)
    return order_R, ends
