"""The MLP branch: dense, or multi-head mixture of experts beside unrouted experts (10 §8, §9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...distributed.exchange import all_reduce_sum, combine_heads, dispatch_heads
from ..config import PreviewConfig
from .activation import swiglu7
from .moe import RoutedExperts
from .norm import rms_norm
from .prepare import Prepared
from .weights import Tensors, Weight


class DenseMlp(nn.Module):
    """The gated MLP of the layers without experts (10 §8)."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.pre_norm = Weight(tensors.at("pre_norm"))
        self.up_gate_proj = Weight(tensors.at("up_gate_proj"))
        self.down_proj = Weight(tensors.at("down_proj"))

    def forward(self, u_SD: Tensor, prepared: Prepared) -> Tensor:
        """Branch input [S, D] -> branch output [S, D], in the compute dtype."""
        out_SD = torch.empty_like(u_SD)
        for piece in prepared.pieces(self.up_gate_proj.blocks):
            modality = piece.modality
            x_RD = rms_norm(u_SD[piece.rows], self.pre_norm.of(modality))
            out_SD[piece.rows] = F.linear(
                swiglu7(F.linear(x_RD, self.up_gate_proj.of(modality))), self.down_proj.of(modality)
            )
        return all_reduce_sum(out_SD, prepared.parallel.tp_group)


class MoeMlp(nn.Module):
    """Split into heads, routed experts, merge; beside them a shared expert and one for each modality (10 §9)."""

    def __init__(self, config: PreviewConfig, tensors: Tensors) -> None:
        super().__init__()
        self.head_dim = config.moe_head_dim
        self.pre_norm = Weight(tensors.at("pre_norm"))
        self.split_linear = Weight(tensors.at("split_linear"))
        self.merge_linear = Weight(tensors.at("merge_linear"))
        self.shared_expert_fc1 = Weight(tensors.at("shared_expert_fc1"))
        self.shared_expert_fc2 = Weight(tensors.at("shared_expert_fc2"))
        self.modality_specific_shared_expert_fc1 = Weight(tensors.at("modality_specific_shared_expert_fc1"))
        self.modality_specific_shared_expert_fc2 = Weight(tensors.at("modality_specific_shared_expert_fc2"))
        self.moe_mlp = RoutedExperts(config.moe, tensors.share.banks, tensors.at("moe_mlp"))

    def forward(self, u_SD: Tensor, prepared: Prepared) -> Tensor:
        """Branch input [S, D] -> branch output [S, D], in the compute dtype; exchanges heads with other ranks."""
        split_SW, out_SD = self.project(u_SD, prepared)
        x_SMd = split_SW.unflatten(1, (-1, self.head_dim))
        y_SMd = self.routed(x_SMd, prepared)
        for piece in prepared.plain_pieces:
            # 10 §9: shared and modality experts are added first, then the routed term.
            merged_RD = F.linear(y_SMd[piece.rows].flatten(1), self.merge_linear.weight)
            out_SD[piece.rows] = merged_RD + out_SD[piece.rows]
        return all_reduce_sum(out_SD, prepared.parallel.tp_group)

    def project(self, u_SD: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
        """The input of all MoE heads of this rank side by side [S, M·d], and the unrouted experts' sum [S, D]."""
        split_SW = u_SD.new_empty(u_SD.shape[0], self.split_linear.weight.shape[0])
        out_SD = torch.empty_like(u_SD)
        for piece in prepared.grouped_pieces:
            modality, rows = piece.modality, piece.rows
            x_RD = rms_norm(u_SD[rows], self.pre_norm.of(modality))
            split_SW[rows] = F.linear(x_RD, self.split_linear.weight)
            # Activating both halves at once, as the reference does, gives the same values: each channel is its own.
            shared_RI = swiglu7(F.linear(x_RD, self.shared_expert_fc1.weight))
            own_RI = swiglu7(F.linear(x_RD, self.modality_specific_shared_expert_fc1.of(modality)))
            out_SD[rows] = F.linear(shared_RI, self.shared_expert_fc2.weight) + F.linear(
                own_RI, self.modality_specific_shared_expert_fc2.of(modality)
            )
        return split_SW, out_SD

    def routed(self, x_SMd: Tensor, prepared: Prepared) -> Tensor:
        """The routed experts of every MoE head. Under tensor parallelism the heads are this rank's already, and only
        tokens of its own are wanted: nothing is exchanged (10 §11.2)."""
        parallel = prepared.parallel
        if parallel.layout.tp > 1:
            return self.moe_mlp(x_SMd, out=x_SMd)
        x_Thd = dispatch_heads(x_SMd, prepared.split, prepared.shares, parallel.sp_group)
        y_Thd = self.moe_mlp(x_Thd, out=x_Thd)
        return combine_heads(y_Thd, prepared.split, prepared.shares, parallel.sp_group)
