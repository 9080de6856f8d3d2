"""What the refiner's forwards share for one text of one request: the rows in block order, their rotary table, their
windows (50 §5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...distributed.exchange import ParallelContext
from ..config import RefinerConfig
from ..dit.inputs import Modality, PackedTokens
from ..dit.prepare import Prepared, count_rows
from ..dit.rope import rotary_table
from ..dit.runs import modality_runs, piece_rows
from ..errors import RequestError
from ..sampling.packing import audio_coords, grid_coords, text_coords
from .blocks import Axes, WindowSettings, plan_blocks
from .window_attention import WindowPlan, plan_windows


@dataclass(frozen=True)
class RefinerPrepared(Prepared):
    """This rank's rows of one sequence: video in block order, then sound, then text, cut evenly over the ranks.

    order_V: the raster row of each packed video row, int64 on the device. windows: who sees whom, over all rows.
    """

    order_V: Tensor
    windows: WindowPlan

    @property
    def grid(self) -> Axes:
        return self.windows.blocks.grid


def row_coords(grid: Axes, audio: int, text: int) -> Tensor:
    """Coordinates of video in raster order, sound and text, fp32 [rows, 9] (50 §5)."""
    return torch.cat([grid_coords(grid, grid), audio_coords(audio), text_coords(text)])


def prepare_refiner(
    config: RefinerConfig,
    grid: Axes,
    audio: int,
    text: int,
    parallel: ParallelContext,
    bands_B: Tensor,
    device: torch.device | str,
    settings: WindowSettings,
    backend: str,
) -> RefinerPrepared:
    """Lay out a sequence of a video of `grid` (t, h, w) tokens with `audio` and `text` rows after it.

    Raises RequestError for an empty video and for a backend that is not known.
    """
    device = torch.device(device)
    blocks = plan_blocks(grid, audio + text, settings)
    order_V = blocks.order()
    coords_T9 = row_coords(grid, audio, text)
    split = parallel.split(blocks.tokens)
    rows_S = torch.cat([order_V, torch.arange(blocks.video, blocks.tokens)])[split.rows]
    counts = (blocks.video, audio, text)
    modality_T = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    return RefinerPrepared(
        parallel=parallel,
        split=split,
        shares=(),
        cu_seqlens=(0, blocks.tokens),
        counts=counts,
        runs=modality_runs(modality_T[split.rows]),
        first_rows=count_rows(modality_T[: split.start]),
        order_S=None,
        rope_SR=rotary_table(coords_T9[rows_S], bands_B.cpu()).to(device),
        piece_rows=piece_rows(2 * config.mlp_width, device.type),
        order_V=order_V.to(device),
        windows=plan_windows(blocks, device, backend),
    )


def pack_refiner(prepared: RefinerPrepared, video_1CTHW: Tensor, audio_1LC: Tensor, text_LD: Tensor) -> PackedTokens:
    """Features of one forward, one tensor for each modality, the video in block order; all fp32 (50 §5).

    The time of the step is not part of them: the refiner is not told it. RequestError for another size.
    """
    if tuple(video_1CTHW.shape[2:]) != prepared.grid or len(video_1CTHW) != 1:
        raise RequestError(
            f"The video latent has shape {tuple(video_1CTHW.shape)}, but the sequence was laid out for"
            f" [1, 48, {', '.join(map(str, prepared.grid))}]."
        )
    return PackedTokens(
        video_NC=video_1CTHW[0].flatten(1).T.float()[prepared.order_V],
        audio_NC=audio_1LC[0].float(),
        text_NC=text_LD.float(),
        time_Tc=None,
    )


def unpack_refiner(
    y_TC: Tensor, prepared: RefinerPrepared, video_channels: int, audio_channels: int
) -> tuple[Tensor, Tensor]:
    """Velocities of the packed rows as video [1, C, T, H, W] and sound [1, L, C] (50 §5)."""
    video, audio = prepared.counts[Modality.VIDEO], prepared.counts[Modality.AUDIO]
    raster_VC = torch.empty_like(y_TC[:video, :video_channels]).index_copy_(
        0, prepared.order_V, y_TC[:video, :video_channels]
    )
    video_1CTHW = raster_VC.T.reshape(1, video_channels, *prepared.grid)
    return video_1CTHW, y_TC[None, video : video + audio, :audio_channels].clone()  # a view would keep all rows alive
