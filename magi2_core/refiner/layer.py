"""One layer of the refiner: gated window attention and a dense MLP on one plain residual stream (50 §3.3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...distributed.exchange import scatter_qkv, scatter_tokens_gather_heads
from ..config import RefinerConfig
from ..dit.activation import swiglu7
from ..dit.attention import Projections, head_gate_
from ..dit.norm import rms_norm
from ..dit.weights import Tensors, Weight
from .prepare import RefinerPrepared
from .window_attention import window_attention_


class Attention(Projections):
    """The attention branch. Weights are whole on every rank; heads divide over the ranks only for the attention."""

    def forward(self, x_SD: Tensor, prepared: RefinerPrepared) -> Tensor:
        """Residual [S, D] -> branch output [S, D] in the weights' dtype, whatever the residual's (50 §13)."""
        q_SHd, k_SHd, v_SHd, gate_SH = self.project(x_SD, prepared)
        split, group = prepared.split, prepared.parallel.sp_group
        q_THd, k_THd, v_THd = scatter_qkv(q_SHd, k_SHd, v_SHd, split, group)
        del q_SHd, k_SHd, v_SHd
        o_THd = window_attention_(q_THd, k_THd, v_THd, prepared.windows)
        del q_THd, k_THd, v_THd
        o_SHd = scatter_tokens_gather_heads(o_THd, split, group)
        del o_THd
        out_SD = o_SHd.flatten(1)  # heads times width is the hidden size, so the result can replace its input
        for piece in prepared.pieces(self.linear_proj.blocks):
            # 50 §3.3: the gate and its product are fp32, rounded once
            gated_RHd = head_gate_(o_SHd[piece.rows], gate_SH[piece.rows].float())
            out_SD[piece.rows] = F.linear(gated_RHd.flatten(1), self.linear_proj.of(piece.modality))
        return out_SD


class Mlp(nn.Module):
    """The MLP branch."""

    def __init__(self, config: RefinerConfig, tensors: Tensors) -> None:
        super().__init__()
        self.dtype = config.params_dtype
        self.pre_norm = Weight(tensors.at("pre_norm"))
        self.up_gate_proj = Weight(tensors.at("up_gate_proj"))
        self.down_proj = Weight(tensors.at("down_proj"))

    def forward(self, x_RD: Tensor, modality: int) -> Tensor:
        """Rows of the residual, of one modality [R, D] -> branch output [R, D] fp32, whatever the residual's dtype."""
        m_RD = rms_norm(x_RD, self.pre_norm.of(modality), dtype=self.dtype)
        m_RI = swiglu7(F.linear(m_RD, self.up_gate_proj.of(modality)))
        return F.linear(m_RI, self.down_proj.of(modality)).float()


class Layer(nn.Module):
    """Attention, then MLP, each added to the residual."""

    def __init__(self, config: RefinerConfig, tensors: Tensors, residual: torch.dtype) -> None:
        super().__init__()
        self.residual = residual
        self.attention = Attention(config.head_dim, tensors.at("attention"))
        self.mlp = Mlp(config, tensors.at("mlp"))

    def forward(self, x_SD: Tensor, prepared: RefinerPrepared) -> Tensor:
        """Residual [S, D] -> residual [S, D] in the residual's own dtype, in place where the dtype is the same.

        50 §3.1: the attention is added in the dtype that the residual comes in, the MLP in fp32.
        """
        x_SD += self.attention(x_SD, prepared)
        out_SD = x_SD if x_SD.dtype == self.residual else torch.empty_like(x_SD, dtype=self.residual)
        for piece in prepared.pieces(self.mlp.up_gate_proj.blocks):
            rows = piece.rows
            out_SD[rows] = x_SD[rows] + self.mlp(x_SD[rows], piece.modality)
        return out_SD
