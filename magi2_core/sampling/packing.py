"""One packed sequence out of a clip's latents, text and pictures, and the latents' velocities back out (20 §6, §7).

What stays the same from step to step is made once, by `pack_request`; a step then costs one copy of the latents. One
branch alone can be packed as well as both: attention never crosses from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..dit.inputs import Modality, PackedLayout, PackedTokens
from ..errors import RequestError
from .time_embedding import time_embedding


@dataclass(frozen=True)
class Conditions:
    """What one branch is conditioned on.

    text_LD: [L, 5120], L may be 0. images_MChw: normalised latents of M pictures of one size, or None.
    markers_MD: the pooled text of each picture's mark in the prompt, [M, 5120], or None.
    """

    text_LD: Tensor
    images_MChw: Tensor | None = None
    markers_MD: Tensor | None = None

    def __post_init__(self) -> None:
        if self.text_LD.ndim != 2:
            shape = tuple(self.text_LD.shape)
            raise RequestError(f"The text features have shape {shape}; they must be [length, width].")
        if (self.images_MChw is None) != (self.markers_MD is None):
            raise RequestError("A reference picture needs both its latent and its marker; one of them is missing.")
        if self.images_MChw is None or self.markers_MD is None:
            return
        if self.images_MChw.ndim != 4:
            raise RequestError(
                f"The picture latents have shape {tuple(self.images_MChw.shape)}; they must be [pictures, 48, h, w]."
            )
        if len(self.images_MChw) != len(self.markers_MD):
            raise RequestError(
                f"There are {len(self.images_MChw)} picture latents and {len(self.markers_MD)} markers;"
                " there must be one marker for each picture."
            )

    @property
    def shape(self) -> BranchShape:
        if self.images_MChw is None:
            return BranchShape(self.text_LD.shape[0])
        pictures, _, height, width = self.images_MChw.shape
        return BranchShape(self.text_LD.shape[0], pictures, (height, width))

    def without_picture_content(self) -> Conditions:
        """The same rows with zeros for the pictures; their marks stay (20 §6.4, `use_ref_for_uncond` off)."""
        if self.images_MChw is None:
            return self
        return replace(self, images_MChw=torch.zeros_like(self.images_MChw))


@dataclass(frozen=True)
class BranchShape:
    """Row counts that a branch adds to the clip's own rows."""

    text: int
    pictures: int = 0
    picture_grid: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class PackingOptions:
    """What the data proxy section of the released JSON fixes; the defaults are the released values (20 §6).

    The product uses nothing else; the reference's other values are there because recorded results use them.
    time_width: width of the time embedding. time_token: one more row at the end of each branch, which holds the time.
    stretch_rope: the spatial reference size of the video is 32 x 32 instead of its own ("inter").
    """

    time_width: int = 64
    time_token: bool = False
    stretch_rope: bool = False


RELEASED = PackingOptions()


@dataclass(frozen=True)
class PackedRequest:
    """Everything of a request's sequence that is the same at every step; read-only.

    text_NC, pictures_NC (one tensor for each branch): fp32, on the device of the forward. timed_T: which rows carry the
    time of the step; the others have time 0.
    """

    layout: PackedLayout
    grid_THW: tuple[int, int, int]
    audio_length: int
    options: PackingOptions
    text_NC: Tensor
    pictures_NC: tuple[Tensor, ...]
    timed_T: Tensor

    @property
    def branches(self) -> int:
        return len(self.pictures_NC)


def pack_layout(
    grid_THW: tuple[int, int, int],
    audio_length: int,
    branches: Sequence[BranchShape],
    options: PackingOptions = RELEASED,
) -> PackedLayout:
    """Coordinates, modalities and boundaries of the packed sequence: pure arithmetic on sizes (20 §6.2, §6.3)."""
    coords: list[Tensor] = []
    modality: list[Tensor] = []
    boundaries = [0]
    for branch in branches:
        segments = _segments(grid_THW, audio_length, branch, options)
        coords += [rows for _, rows in segments]
        modality += [torch.full((len(rows),), kind, dtype=torch.int32) for kind, rows in segments]
        boundaries.append(boundaries[-1] + sum(len(rows) for _, rows in segments))
    return PackedLayout(torch.cat(coords), torch.cat(modality), tuple(boundaries))


def _segments(
    grid_THW: tuple[int, int, int], audio_length: int, branch: BranchShape, options: PackingOptions
) -> list[tuple[Modality, Tensor]]:
    """The segments of one branch in order, each with its coordinates [rows, 9] (20 §6.2, §6.3)."""
    frames = grid_THW[0]
    reference = (frames, 32, 32) if options.stretch_rope else grid_THW
    segments = [
        (Modality.VIDEO, grid_coords(grid_THW, reference)),
        (Modality.AUDIO, audio_coords(audio_length)),
        (Modality.TEXT, text_coords(branch.text)),
    ]
    for picture in range(branch.pictures):
        size = (1, *branch.picture_grid)
        place = frames + 2 + picture
        mark = torch.tensor([[place, -1, -1, *size, *size]], dtype=torch.float32)
        segments += [(Modality.TEXT, mark), (Modality.VIDEO, grid_coords(size, size, start=(place, 0, 0)))]
    if options.time_token:
        segments.append((Modality.TIME, torch.tensor([[0.0, 0, 0, 1, 1, 1, 1, 1, 1]])))
    return segments


def grid_coords(
    size: tuple[int, int, int], reference: tuple[int, int, int], start: tuple[int, int, int] = (0, 0, 0)
) -> Tensor:
    """Coordinates of a grid in raster order, fp32 [rows, 9]: position, size, reference size (20 §6.3)."""
    axes = [torch.arange(first, first + length, dtype=torch.float32) for first, length in zip(start, size, strict=True)]
    position = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    constant = torch.tensor([*size, *reference], dtype=torch.float32).expand(len(position), 6)
    return torch.cat([position, constant], dim=1)


def audio_coords(length: int) -> Tensor:
    """Coordinates of the sound; its reference size is that of the video latents that last as long (20 §6.3)."""
    return grid_coords((length, 1, 1), ((length - 1) // 8 + 1, 1, 1))


def text_coords(length: int) -> Tensor:
    """Coordinates of text, which stands before the clip, from -length to -1 (20 §6.3)."""
    return grid_coords((length, 1, 1), (1, 1, 1), start=(-length, 0, 0))


def pack_request(
    grid_THW: tuple[int, int, int],
    audio_length: int,
    branches: Sequence[Conditions],
    device: torch.device | str = "cpu",
    options: PackingOptions = RELEASED,
) -> PackedRequest:
    """Make what all steps of a request share: the layout, and the rows of text and pictures on `device`.

    branches: the conditional one first, then the unconditional one; or either alone, when each is evaluated apart.
    """
    layout = pack_layout(grid_THW, audio_length, [branch.shape for branch in branches], options)
    text: list[Tensor] = []
    pictures: list[Tensor] = []
    for branch in branches:
        text.append(branch.text_LD.to(device, torch.float32))
        if branch.markers_MD is not None:
            text.append(branch.markers_MD.to(device, torch.float32))
        if options.time_token:
            text.append(torch.zeros(1, branch.text_LD.shape[1], device=device))
        pictures.append(_picture_rows(branch, device))
    timed = torch.cat([_timed_rows(grid_THW, audio_length, branch.shape, options) for branch in branches])
    return PackedRequest(
        layout, grid_THW, audio_length, options, torch.cat(text), tuple(pictures), timed.to(device)
    )


def _picture_rows(branch: Conditions, device: torch.device | str) -> Tensor:
    if branch.images_MChw is None:
        return torch.zeros(0, 0, device=device)
    return branch.images_MChw.to(device, torch.float32).permute(0, 2, 3, 1).flatten(0, 2)


def _timed_rows(
    grid_THW: tuple[int, int, int], audio_length: int, branch: BranchShape, options: PackingOptions
) -> Tensor:
    """Which rows of a branch carry the time of the step: those of the clip itself, and the time token (20 §6.2)."""
    segments = _segments(grid_THW, audio_length, branch, options)
    timed = [index < 2 or kind == Modality.TIME for index, (kind, _) in enumerate(segments)]
    return torch.cat([torch.full((len(rows),), on) for on, (_, rows) in zip(timed, segments, strict=True)])


def pack_tokens(request: PackedRequest, video_1CTHW: Tensor, audio_1LC: Tensor, time: float) -> PackedTokens:
    """The rows of one step: the latents in every branch, with the time tau (an fp32 value) of the step (20 §6.1).

    video [1, C, T, H, W] and audio [1, L, C], fp32, of the request's sizes; RequestError for others.
    """
    grid, length = tuple(video_1CTHW.shape[2:]), audio_1LC.shape[1]
    if len(video_1CTHW) != 1 or grid != request.grid_THW or len(audio_1LC) != 1 or length != request.audio_length:
        raise RequestError(
            f"The latents have shapes {tuple(video_1CTHW.shape)} and {tuple(audio_1LC.shape)}, but the request was"
            f" packed for a video of [1, 48, {', '.join(map(str, request.grid_THW))}] and an audio of"
            f" [1, {request.audio_length}, 64]."
        )
    clip_NC = video_1CTHW[0].flatten(1).T
    video = [rows for pictures in request.pictures_NC for rows in (clip_NC, pictures) if rows.shape[0]]
    return PackedTokens(
        video_NC=torch.cat(video) if video else clip_NC,
        audio_NC=audio_1LC[0].repeat(request.branches, 1),
        text_NC=_text_rows(request, time),
        time_Tc=_time_rows(request, time),
    )


def _text_rows(request: PackedRequest, time: float) -> Tensor:
    if not request.options.time_token:
        return request.text_NC
    modality_T = request.layout.modality_T
    is_time = modality_T[modality_T >= Modality.TEXT] == Modality.TIME
    text_NC = request.text_NC.clone()
    text_NC[is_time.to(text_NC.device), 0] = time
    return text_NC


def _time_rows(request: PackedRequest, time: float) -> Tensor | None:
    width = request.options.time_width
    if not width:
        return None
    device = request.timed_T.device
    now_c, clean_c = (time_embedding(t, width).to(device) for t in (time, 0.0))
    return torch.where(request.timed_T[:, None], now_c, clean_c)


def unpack(y_TC: Tensor, request: PackedRequest, video_channels: int, audio_channels: int) -> tuple[Tensor, Tensor]:
    """Velocities out of the model's rows: video [B, C, T, H, W] and audio [B, L, C] for B branches (20 §7).

    Rows of pictures and text are left behind, although pictures carry numbers.
    """
    if y_TC.shape[0] != request.layout.tokens:
        raise ValueError(f"The model returned {y_TC.shape[0]} rows for a sequence of {request.layout.tokens}.")
    frames, height, width = request.grid_THW
    rows = frames * height * width
    video, audio = [], []
    for start in request.layout.cu_seqlens[:-1]:
        clip_NC = y_TC[start : start + rows, :video_channels]
        video.append(clip_NC.T.reshape(video_channels, frames, height, width))
        audio.append(y_TC[start + rows : start + rows + request.audio_length, :audio_channels])
    return torch.stack(video), torch.stack(audio)
