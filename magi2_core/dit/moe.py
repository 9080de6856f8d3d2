"""The routed experts of the MoE heads that a rank touches (10 §9, 70 §5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...distributed.layout import BankShare
from ..config import MoeConfig
from ..kernels.experts import head_experts
from .router import route
from .weights import Tensors

_HIDDEN = 1 << 28
"""Elements of one hidden tensor [routes, F]: tokens beyond it wait their turn, so that 540p needs no more than 272p."""


def tokens_at_once(moe: MoeConfig) -> int:
    """Tokens of one head that are routed and evaluated together."""
    return max(1, _HIDDEN // (moe.top_k * moe.expert_intermediate_size))


class Router(nn.Module):
    """The selection biases; `expert_bias` is the one in force, which loading fills from the ema one (10 §12.2)."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.expert_bias = tensors["expert_bias"]
        self.expert_bias_ema = tensors["expert_bias_ema"]


class RoutedExperts(nn.Module):
    """The experts of the MoE heads that this rank touches, and the router of all experts of those heads (10 §9)."""

    def __init__(self, moe: MoeConfig, share: BankShare, tensors: Tensors) -> None:
        super().__init__()
        self.moe = moe
        self.share = share
        self.gate = tensors["gate"]
        self.W_gate = tensors["W_gate"]
        self.W_up = tensors["W_up"]
        self.W_down = tensors["W_down"]
        self.router = Router(tensors.at("router"))

    def forward(self, x_Thd: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, heads of this rank, d] -> the sum of this rank's experts for each token and head, same shape and dtype.

        A head of which another rank holds some experts is routed in full on both, and each adds its own (70 §5). The
        result is written to `out` if given, which may be the input itself.
        """
        y_Thd = torch.empty_like(x_Thd) if out is None else out
        tokens = tokens_at_once(self.moe)
        for head in range(self.share.heads):
            for start in range(0, x_Thd.shape[0], tokens):
                rows = slice(start, start + tokens)
                y_Thd[rows, head] = self.one_head(x_Thd[rows, head], head)
        return y_Thd

    def one_head(self, x_Td: Tensor, head: int) -> Tensor:
        """The rank's head number `head` for some tokens [T, d]."""
        share, experts = self.share, self.share.experts
        weights_TK, bank_TK = self.choose(x_Td, head)
        # The head's experts [first, last) that this rank holds, and where they lie in its own tensors.
        head_bank = (share.first_head + head) * experts
        first, last = max(share.first_bank - head_bank, 0), min(share.last_bank - head_bank, experts)
        banks = slice(head_bank + first - share.first_bank, head_bank + last - share.first_bank)
        shared = last - first < experts
        if shared:  # experts of other ranks sort behind the own ones
            own_TK = (bank_TK >= first) & (bank_TK < last)
            bank_TK = torch.where(own_TK, bank_TK - first, last - first)
        return head_experts(
            x_Td, weights_TK, bank_TK, self.W_gate[banks], self.W_up[banks], self.W_down[banks], shared=shared
        )

    def choose(self, x_Td: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Weights and expert ids [T, K] of the rank's head number `head`; the logits are true fp32 (10 §9)."""
        rows = slice(head * self.share.experts, (head + 1) * self.share.experts)
        logits_TE = F.linear(x_Td.float(), self.gate[rows])
        bias_E, moe = self.router.expert_bias[rows], self.moe
        return route(logits_TE, bias_E, moe.top_k, normalize=moe.route_norm, scale=moe.route_scale)
