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

    def forward(self, x_Thd: Tensor) -> Tensor:
        """[T, heads of this rank, d] -> the sum of this rank's experts for each token and head, same shape and dtype.

        A head of which another rank holds some experts is routed in full on both, and each adds its own (70 §5).
        """
        y_Thd = torch.empty_like(x_Thd)
        share, experts = self.share, self.share.experts
        for head in range(share.heads):
            x_Td = x_Thd[:, head]
            weights_TK, expert_TK = self.choose(x_Td, head)
            # The head's experts that this rank holds, and where the first of them lies in its own tensors.
            start = (share.first_head + head) * experts
            first, last = max(share.first_bank - start, 0), min(share.last_bank - start, experts)
            shared = last - first < experts
            if shared:  # experts of other ranks sort behind the own ones
                own_TK = (expert_TK >= first) & (expert_TK < last)
                expert_TK = torch.where(own_TK, expert_TK - first, last - first)
            banks = slice(start + first - share.first_bank, start + last - share.first_bank)
            y_Thd[:, head] = head_experts(
                x_Td, weights_TK, expert_TK, self.W_gate[banks], self.W_up[banks], self.W_down[banks], shared=shared
            )
        return y_Thd

    def choose(self, x_Td: Tensor, head: int) -> tuple[Tensor, Tensor]:
        """Weights and expert ids [T, K] of the rank's head number `head`; the logits are true fp32 (10 §9)."""
        rows = slice(head * self.share.experts, (head + 1) * self.share.experts)
        logits_TE = F.linear(x_Td.float(), self.gate[rows])
        bias_E, moe = self.router.expert_bias[rows], self.moe
        return route(logits_TE, bias_E, moe.top_k, normalize=moe.route_norm, scale=moe.route_scale)
