"""What the preview transformer takes: one packed sequence of rows of three modalities (10 §2, 20 §6)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class Modality(IntEnum):
    """Row kinds of the packed sequence. TIME rows are treated as text inside the transformer (10 §2)."""

    VIDEO = 0
    AUDIO = 1
    TEXT = 2
    TIME = 3


@dataclass(frozen=True)
class PackedLayout:
    """Everything about a packed sequence that does not change from step to step; made once per request.

    coords_T9: fp32 CPU; columns t, y, x, size t, y, x, reference t, y, x (20 §6.3).
    modality_T: int32 CPU, values of `Modality`.
    cu_seqlens: segment boundaries over the whole sequence, from 0 to T (attention never crosses one).
    """

    coords_T9: Tensor
    modality_T: Tensor
    cu_seqlens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.modality_T.shape[0]


@dataclass(frozen=True)
class PackedTokens:
    """The features of one forward, one tensor per modality, each with its rows in sequence order.

    video_NC [video rows, 48], audio_NC [audio rows, 64], text_NC [text and time rows, 5120]: fp32, identical on all
    ranks. time_Tc [T, c]: the embedding of each row's own diffusion time, fp32, or None for no overwrite (10 §2).
    """

    video_NC: Tensor
    audio_NC: Tensor
    text_NC: Tensor
    time_Tc: Tensor | None
