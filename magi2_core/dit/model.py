"""The preview transformer: one packed token sequence in, one packed velocity sequence out (10 §2).

Shape legend of the core: T tokens of the whole sequence, S tokens of this rank, R rows of a piece, D hidden size,
H heads, d head width, N residual streams, W = N·D, C channels; M MoE heads, E experts, K chosen experts, F expert
width. In the routed experts R counts routes, in weights M may count modality blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...distributed.exchange import ParallelContext, gather_tokens
from ...distributed.layout import RankShare
from ..config import PreviewConfig
from ..errors import RequestError
from ..events import SILENT, Events
from ..precision import true_fp32
from .adapters import PostAdapter, PreAdapter
from .attention import Attention
from .inputs import PackedLayout, PackedTokens
from .mhc import Mix, branch_input, coefficients, update_streams_
from .mlp import DenseMlp, MoeMlp
from .norm import rms_norm
from .parameters import preview_tensors
from .prepare import Prepared, prepare
from .weights import Tensors, Weight


class Layer(nn.Module):
    """One transformer layer: attention, then MLP, each between a read from and a write to the residual streams."""

    def __init__(self, config: PreviewConfig, layer: int, tensors: Tensors) -> None:
        super().__init__()
        self.streams = config.num_stream
        for branch in ("attn", "mlp"):
            for kind in ("pre", "post", "res"):
                for tensor in ("alpha", "bias"):
                    name = f"mhc_{tensor}_{kind}_{branch}"
                    self.register_parameter(name, tensors[name])
            self.register_parameter(f"mhc_phi_fused_{branch}", tensors[f"mhc_phi_fused_{branch}"])
        self.mhc_norm = Weight(tensors.at("mhc_norm"))
        self.attention = Attention(config, tensors.at("attention"))
        mlp = tensors.at("mlp")
        self.mlp = MoeMlp(config, mlp) if layer in config.moe.moe_layers else DenseMlp(mlp)

    def forward(self, streams_SW: Tensor, prepared: Prepared) -> None:
        """Update the residual streams [S, N·D] of this rank's rows in place."""
        streams_SND = streams_SW.unflatten(1, (self.streams, -1))
        for name, branch in (("attn", self.attention), ("mlp", self.mlp)):
            mix, u_SD = self.read(name, streams_SW, prepared)
            out_SD = branch(u_SD, prepared)
            del u_SD
            for piece in prepared.plain_pieces:
                update_streams_(streams_SND[piece.rows], mix.rows(piece.rows), out_SD[piece.rows])
            del out_SD  # the next branch's input takes its place

    def read(self, branch: str, streams_SW: Tensor, prepared: Prepared) -> tuple[Mix, Tensor]:
        """A branch's mixing coefficients and its input [S, D], both from the streams before it (10 §6)."""
        phi_WG = getattr(self, f"mhc_phi_fused_{branch}")
        logits_SG = torch.empty((streams_SW.shape[0], phi_WG.shape[1]), device=streams_SW.device)
        for piece in prepared.pieces(self.mhc_norm.blocks):
            norm_W = self.mhc_norm.of(piece.modality)
            # No name for the normed rows: they would live on while the next piece is normed.
            logits_SG[piece.rows] = rms_norm(streams_SW[piece.rows], norm_W, dtype=torch.float32) @ phi_WG
        alphas = [getattr(self, f"mhc_alpha_{kind}_{branch}") for kind in ("pre", "post", "res")]
        biases = [getattr(self, f"mhc_bias_{kind}_{branch}") for kind in ("pre", "post", "res")]
        mix = coefficients(logits_SG, alphas, biases, streams_SW.shape[1] ** -0.5, streams_SW.dtype)
        streams_SND = streams_SW.unflatten(1, (self.streams, -1))
        u_SD = torch.empty_like(streams_SND[:, 0], memory_format=torch.contiguous_format)
        for piece in prepared.plain_pieces:
            u_SD[piece.rows] = branch_input(streams_SND[piece.rows], mix.rows(piece.rows))
        return mix, u_SD


class Block(nn.Module):
    """The layers, under the name that checkpoints give them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class PreviewTransformer(nn.Module):
    """The preview transformer as one rank of a parallel layout holds it.

    Build it under `torch.device("meta")` and fill it with `load_module`: `state_dict()` has exactly the keys of
    `preview_tensors(config)`, in this rank's shapes. `compute_dtype` bfloat16 is the reference; float32 is its exact
    form, in which every bf16 becomes fp32 and nothing else changes (10 §1). It defaults to `config.params_dtype`.
    Raises RequestError for another dtype, CheckpointError where tensor parallelism does not divide a tensor.
    """

    def __init__(
        self,
        config: PreviewConfig,
        parallel: ParallelContext | None = None,
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype or config.params_dtype
        if self.compute_dtype not in (torch.bfloat16, torch.float32):
            raise RequestError(f"The compute dtype is {self.compute_dtype}; it must be bfloat16 or float32.")
        self.config = replace(config, params_dtype=self.compute_dtype)
        self.parallel = parallel or ParallelContext.single()
        share: RankShare = self.parallel.share(config.moe.num_heads, config.moe.num_experts)
        tensors = Tensors(preview_tensors(self.config), share)
        self.pre_adapter = PreAdapter(tensors.at("pre_adapter"))
        layers = tensors.at("block").at("layers")
        self.block = Block(Layer(self.config, i, layers.at(str(i))) for i in range(config.num_layers))
        self.post_adapter = PostAdapter(self.config, tensors.at("post_adapter"))

    def prepare(self, layout: PackedLayout, device: torch.device | str) -> Prepared:
        """Make what every forward of a request shares; call it once. Raises RequestError for a bad layout."""
        return prepare(self.config, layout, self.parallel, self.pre_adapter.rope.bands, device)

    @torch.no_grad()
    def forward(self, prepared: Prepared, tokens: PackedTokens, events: Events = SILENT) -> Tensor:
        """Velocity of every token [T, max(video, audio channels)] fp32, the whole sequence on every rank.

        Video rows fill the first 48 columns, audio rows the first 64, the rest is zero (10 §2). `tokens` must be equal
        on all ranks and on the model's device. `events.check()` is called between layers.
        """
        with true_fp32():
            streams_SW = self.pre_adapter(tokens, prepared, self.compute_dtype)
            for layer in self.block.layers:
                events.check()
                layer(streams_SW, prepared)
            y_SC = self.post_adapter(streams_SW, prepared)
        return gather_tokens(y_SC, prepared.split, self.parallel.sp_group)
