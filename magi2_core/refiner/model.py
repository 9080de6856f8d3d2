"""The second stage's transformer: a clip's latents and its text in, velocities out (50 §3). Legend: dit/model.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ...distributed.exchange import ParallelContext, gather_tokens
from ...distributed.layout import BankShare, ParallelLayout, RankShare
from ..config import RefinerConfig
from ..dit.adapters import PostAdapter, PreAdapter
from ..dit.inputs import PackedTokens
from ..dit.model import Block
from ..dit.weights import Tensors
from ..errors import RequestError
from ..events import SILENT, Events
from ..precision import true_fp32
from .blocks import Axes, WindowSettings
from .layer import Layer
from .parameters import refiner_tensors
from .prepare import RefinerPrepared, prepare_refiner

RELEASED_WINDOW = WindowSettings()


class RefinerTransformer(nn.Module):
    """The refiner; every rank holds all of it (50 §8).

    Build it under `torch.device("meta")` and fill it with `load_module`: `state_dict()` has exactly the keys of
    `refiner_tensors(config)`. `compute_dtype` bfloat16 is the reference; float32 is its exact form; it defaults to
    `config.params_dtype`. `residual` is the dtype of the residual after the first layer: float32 is the reference,
    bfloat16 halves the largest tensor that lives through the forward (50 §7). On random models of 30 layers its result
    is 0.020 to 0.023 from the fp32 form's, as a relative L2 distance, where the reference's precision is 0.012 to 0.015
    from it. Raises RequestError for another dtype.
    """

    def __init__(
        self,
        config: RefinerConfig,
        parallel: ParallelContext | None = None,
        *,
        compute_dtype: torch.dtype | None = None,
        residual: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype or config.params_dtype
        for name, dtype in (("compute", self.compute_dtype), ("residual", residual)):
            if dtype not in (torch.bfloat16, torch.float32):
                raise RequestError(f"The {name} dtype of the refiner is {dtype}; it must be bfloat16 or float32.")
        self.config = replace(config, params_dtype=self.compute_dtype)
        self.parallel = parallel or ParallelContext.single()
        tensors = Tensors(refiner_tensors(self.config), _EVERYTHING)
        self.pre_adapter = PreAdapter(tensors.at("pre_adapter"))
        layers = tensors.at("block").at("layers")
        self.block = Block(Layer(self.config, layers.at(str(i)), residual) for i in range(config.num_layers))
        self.post_adapter = PostAdapter(self.config, tensors.at("post_adapter"))

    def prepare(
        self,
        grid: Axes,
        text: int,
        device: torch.device | str,
        *,
        audio: int = 0,
        window: WindowSettings = RELEASED_WINDOW,
        backend: str = "auto",
    ) -> RefinerPrepared:
        """Make what all forwards with one text share: a video of `grid` (t, h, w) latents, `text` rows of text.

        audio: rows of sound, none in the released setting. backend: of the window attention. Raises RequestError.
        """
        bands_B = self.pre_adapter.rope.bands
        return prepare_refiner(self.config, grid, audio, text, self.parallel, bands_B, device, window, backend)

    @torch.no_grad()
    def forward(self, prepared: RefinerPrepared, tokens: PackedTokens, events: Events = SILENT) -> Tensor:
        """Velocity of every row [T, max(video, audio channels)] fp32 in packed order, on every rank; text rows are 0.

        `tokens` must be equal on all ranks and on the model's device. `events.check()` is called between layers.
        """
        with true_fp32():
            # 50 §3.1: the residual starts in the compute dtype
            x_SD = self.pre_adapter(tokens, prepared, self.compute_dtype)
            for layer in self.block.layers:
                events.check()
                x_SD = layer(x_SD, prepared)
            y_SC = self.post_adapter(x_SD, prepared)
        return gather_tokens(y_SC, prepared.split, self.parallel.sp_group)


def refiner_parallel(parallel: ParallelContext, config: RefinerConfig) -> ParallelContext:
    """How the ranks of a replica share the refiner: as one sequence-parallel group, whatever the preview's layout is.

    Where their number does not divide the heads, the preview's own sequence-parallel groups work side by side on the
    same clip; where theirs does not either, every rank does (50 §8).
    """
    layout, position = parallel.layout, parallel.position
    for ranks, rank, group in (
        (layout.replica, parallel.rank % layout.replica, parallel.replica_group),
        (layout.sp, position.sp, parallel.sp_group),
    ):
        kv_fit = config.kv_heads % ranks == 0 or ranks % config.kv_heads == 0
        if config.heads % ranks == 0 and kv_fit:
            return ParallelContext(ParallelLayout(sp=ranks), rank, group, None, None, group, parallel.device)
    return ParallelContext.single(parallel.device)


_EVERYTHING = RankShare(1, 0, BankShare(0, 0, 1))
