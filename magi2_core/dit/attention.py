"""The attention branch: gated, with normed and rotated queries and keys, and learned sinks (10 §7)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...distributed.exchange import all_reduce_sum, scatter_qkv, scatter_tokens_gather_heads
from ..config import PreviewConfig
from ..kernels.attention import varlen_attention
from .norm import rms_norm
from .prepare import Prepared
from .rope import rotate
from .weights import Tensors, Weight


class Projections(nn.Module):
    """What the attention branches of both transformers share: their weights, and the way to queries, keys and values.

    Weights of this rank's heads only, under tensor parallelism.
    """

    def __init__(self, head_dim: int, tensors: Tensors) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.pre_norm = Weight(tensors.at("pre_norm"))
        self.linear_qkv = Weight(tensors.at("linear_qkv"))
        self.linear_g = Weight(tensors.at("linear_g"))
        self.linear_proj = Weight(tensors.at("linear_proj"))
        self.q_norm = Weight(tensors.at("q_norm"))
        self.k_norm = Weight(tensors.at("k_norm"))

    def project(self, x_SD: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [S, H, d], k and v [S, Hk, d], views of one buffer, q and k normed and rotated; gate logits [S, H].

        All in the weights' dtype, whatever that of the branch's input [S, D] is.
        """
        dtype, heads = self.linear_qkv.weight.dtype, self.linear_g.of(0).shape[0]
        all_heads = self.linear_qkv.of(0).shape[0] // self.head_dim
        counts = [heads, *[(all_heads - heads) // 2] * 2]
        qkv_SHd = x_SD.new_empty(x_SD.shape[0], all_heads, self.head_dim, dtype=dtype)
        gate_SH = x_SD.new_empty(x_SD.shape[0], heads, dtype=dtype)
        q_SHd, k_SHd, v_SHd = qkv_SHd.split(counts, dim=1)
        for piece in prepared.pieces(self.linear_qkv.blocks):
            modality, rows = piece.modality, piece.rows
            x_RD = rms_norm(x_SD[rows], self.pre_norm.of(modality), dtype)
            gate_SH[rows] = F.linear(x_RD, self.linear_g.of(modality))
            qkv_RHd = F.linear(x_RD, self.linear_qkv.of(modality)).unflatten(1, (-1, self.head_dim))
            q_RHd, k_RHd, v_SHd[rows] = qkv_RHd.split(counts, dim=1)
            # 10 §14.7, 50 §3.3: fp32 through norm and rotation, rounded here for the first time.
            rope_RR = prepared.rope_SR[rows]
            q_SHd[rows] = rotate(rms_norm(q_RHd, self.q_norm.of(modality), torch.float32), rope_RR)
            k_SHd[rows] = rotate(rms_norm(k_RHd, self.k_norm.of(modality), torch.float32), rope_RR)
        return q_SHd, k_SHd, v_SHd, gate_SH


class Attention(Projections):
    """One layer's attention branch, with this rank's shapes."""

    def __init__(self, config: PreviewConfig, tensors: Tensors) -> None:
        super().__init__(config.head_dim, tensors)
        self.softcap = config.attn_softcap
        self.sinks = tensors["sinks"]

    def forward(self, u_SD: Tensor, prepared: Prepared) -> Tensor:
        """Branch input [S, D] -> branch output [S, D], in the compute dtype; exchanges tokens with other ranks."""
        split, group = prepared.split, prepared.parallel.sp_group
        q_SHd, k_SHd, v_SHd, gate_SH = self.project(u_SD, prepared)
        # 10 §14.11: rotated by now, because positions are local; segments count over the whole sequence.
        q_THd, k_THd, v_THd = scatter_qkv(q_SHd, k_SHd, v_SHd, split, group)
        del q_SHd, k_SHd, v_SHd
        sinks_NH = self.sinks.chunk(split.ranks, dim=1)[split.rank]
        o_THd = attend(q_THd, k_THd, v_THd, prepared.cu_seqlens, sinks_NH, self.softcap)
        del q_THd, k_THd, v_THd
        o_SHd = scatter_tokens_gather_heads(o_THd, split, group)
        del o_THd
        out_SD = torch.empty_like(u_SD)
        for piece in prepared.pieces(self.linear_proj.blocks):
            gated_RHd = head_gate_(o_SHd[piece.rows], gate_SH[piece.rows])
            out_SD[piece.rows] = F.linear(gated_RHd.flatten(1), self.linear_proj.of(piece.modality))
        return all_reduce_sum(out_SD, prepared.parallel.tp_group)


def attend(
    q_THd: Tensor,
    k_THd: Tensor,
    v_THd: Tensor,
    cu_seqlens: Sequence[int],
    sinks_NH: Tensor,
    softcap: float,
) -> Tensor:
    """Attention inside each segment with scale d^-1/2, then the sinks (10 §7 steps 8, 9). Returns [T, H, d]."""
    o_THd, lse_HT = varlen_attention(q_THd, k_THd, v_THd, cu_seqlens, scale=q_THd.shape[-1] ** -0.5, softcap=softcap)
    return apply_sinks_(o_THd, lse_HT, sinks_NH)


def apply_sinks_(o_THd: Tensor, lse_HT: Tensor, sinks_NH: Tensor) -> Tensor:
    """Shrink the outputs in place as if every head had further keys with these logits and values of zero.

    The share that the real keys keep, exp(lse) / (exp(lse) + Σ exp(sink)), is fp32 and not rounded (10 §7 step 9).
    """
    share_HT = torch.sigmoid(lse_HT - sinks_NH.logsumexp(0)[:, None])
    return o_THd.mul_(share_HT.t()[..., None])


def head_gate_(o_THd: Tensor, gate_TH: Tensor) -> Tensor:
    """o · sigmoid(gate) for each head, in place; the sigmoid keeps the gate's dtype, as eager code has it (10 §7)."""
    return o_THd.mul_(torch.sigmoid(gate_TH)[..., None])
