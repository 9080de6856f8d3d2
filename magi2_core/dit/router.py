"""Which experts each (token, MoE head) pair uses, and how much (10 §9)."""

from __future__ import annotations

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
