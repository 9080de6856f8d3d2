"""What a forward needs that stays the same for a whole request: made once, so that no step or layer computes it.

Rows keep the packed order, except that inside each segment of a rank's rows they are grouped by modality; packing
already does so, and then nothing is moved at all. Segments stay contiguous over all ranks, so attention needs no
permutation (10 §3, §7), and each modality's rows stay in sequence order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ...distributed.exchange import ParallelContext
from ...distributed.layout import BankShare, TokenSplit
from ..config import PreviewConfig
from ..errors import RequestError
from .inputs import Modality, PackedLayout
from .rope import rotary_table
from .runs import MODALITIES, Run, modality_runs, piece_rows, pieces


@dataclass(frozen=True)
class Prepared:
    """This rank's part of a packed sequence, for every forward of a request. Integers are on the host.

    runs: the local rows by modality; first_rows: for each modality, how many of its rows lie on earlier ranks.
    order_S: the packed row, counted from the rank's first, of each local row; None where they are equal.
    rope_SR: the rotary table of the local rows. shares: the expert banks of each rank that divides them.
    """

    parallel: ParallelContext
    split: TokenSplit
    shares: tuple[BankShare, ...]
    cu_seqlens: tuple[int, ...]
    counts: tuple[int, ...]
    runs: tuple[Run, ...]
    first_rows: tuple[int, ...]
    order_S: Tensor | None
    rope_SR: Tensor
    piece_rows: int

    @cached_property
    def grouped_pieces(self) -> tuple[Run, ...]:
        """Pieces of rows of one modality each, for weights with a block for each modality."""
        return pieces(self.runs, self.piece_rows)

    @cached_property
    def plain_pieces(self) -> tuple[Run, ...]:
        """Pieces of rows without regard to modality, for weights with a single block."""
        return pieces([Run(0, 0, self.split.local)], self.piece_rows)

    def pieces(self, blocks: int) -> tuple[Run, ...]:
        """The rows, for weights of that many modality blocks."""
        return self.plain_pieces if blocks == 1 else self.grouped_pieces


def prepare(
    config: PreviewConfig, layout: PackedLayout, parallel: ParallelContext, bands_B: Tensor, device: torch.device | str
) -> Prepared:
    """Take this rank's rows of a packed sequence and make everything that depends on their positions only.

    Raises RequestError if the layout is inconsistent.
    """
    check_layout(layout)
    device = torch.device(device)
    split = parallel.split(layout.tokens)
    # A time row is a text row from here on (10 §2).
    modality_T = layout.modality_T.cpu().clamp(max=Modality.TEXT).long()
    segment_T = torch.bucketize(torch.arange(layout.tokens), torch.tensor(layout.cu_seqlens[1:]), right=True)
    key_S = (segment_T * MODALITIES + modality_T)[split.rows]
    order_S = key_S.argsort(stable=True)
    moved = not torch.equal(order_S, torch.arange(split.local))
    coords_S9 = layout.coords_T9.cpu()[split.rows][order_S]
    return Prepared(
        parallel=parallel,
        split=split,
        shares=parallel.layout.expert_shares(config.moe.num_heads, config.moe.num_experts),
        cu_seqlens=layout.cu_seqlens,
        counts=count_rows(modality_T),
        runs=modality_runs(modality_T[split.rows][order_S]),
        first_rows=count_rows(modality_T[: split.start]),
        order_S=order_S.to(device) if moved else None,
        rope_SR=rotary_table(coords_S9, bands_B.cpu()).to(device),
        piece_rows=piece_rows(config.stream_width, device.type),
    )


def check_layout(layout: PackedLayout) -> None:
    """Raise RequestError if the parts of a layout do not fit each other."""
    tokens, bounds = layout.tokens, layout.cu_seqlens
    if layout.coords_T9.shape != (tokens, 9):
        raise RequestError(f"The coordinates have shape {tuple(layout.coords_T9.shape)}; expected [{tokens}, 9].")
    ascending = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or not ascending:
        # 10 §14.13: a row in no segment would keep whatever was in memory.
        raise RequestError(f"The segment boundaries {bounds} must ascend from 0 to {tokens}, the number of tokens.")
    if tokens and not 0 <= int(layout.modality_T.min()) <= int(layout.modality_T.max()) <= Modality.TIME:
        raise RequestError("A token has a modality that is none of video (0), audio (1), text (2) and time (3).")


def count_rows(modality_T: Tensor) -> tuple[int, ...]:
    """How many rows of each modality there are."""
    return tuple(torch.bincount(modality_T, minlength=MODALITIES).tolist())
