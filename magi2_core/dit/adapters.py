"""From features to residual streams and from residual streams to velocities, each modality by itself (10 §4, §10)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import TransformerConfig
from ..errors import RequestError
from .inputs import PackedTokens
from .norm import rms_norm
from .prepare import Prepared
from .weights import Tensors, Weight


class Bands(nn.Module):
    """The stored rotary frequencies."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.bands = tensors["bands"]


class PreAdapter(nn.Module):
    """The fp32 embedders, straight to all residual streams (10 §4)."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self.video_embedder = Weight(tensors.at("video_embedder"))
        self.audio_embedder = Weight(tensors.at("audio_embedder"))
        self.text_embedder = Weight(tensors.at("text_embedder"))
        self.rope = Bands(tensors.at("rope"))

    def forward(self, tokens: PackedTokens, prepared: Prepared, dtype: torch.dtype) -> Tensor:
        """Features of the whole sequence -> streams of this rank's rows [S, N·D] in `dtype`."""
        embedders = (self.video_embedder, self.audio_embedder, self.text_embedder)
        features = (tokens.video_NC, tokens.audio_NC, tokens.text_NC)
        self.check(tokens, prepared)
        time_Sc = None
        if tokens.time_Tc is not None and tokens.time_Tc.shape[1]:
            time_Sc = tokens.time_Tc[prepared.split.rows]
            time_Sc = time_Sc if prepared.order_S is None else time_Sc[prepared.order_S]
        width = self.video_embedder.weight.shape[0]
        streams_SW = torch.empty((prepared.split.local, width), dtype=dtype, device=self.video_embedder.weight.device)
        sources = list(prepared.first_rows)
        for piece in prepared.grouped_pieces:
            source, count = sources[piece.modality], piece.stop - piece.start
            sources[piece.modality] += count
            x_RC, embedder = features[piece.modality][source : source + count], embedders[piece.modality]
            embedded_RW = F.linear(x_RC, embedder.weight, embedder.bias)
            if time_Sc is not None:
                # 10 §2 step 4: overwritten in every row, not added.
                embedded_RW[:, : time_Sc.shape[1]] = time_Sc[piece.rows]
            streams_SW[piece.rows] = embedded_RW
            del embedded_RW  # before the next piece's
        return streams_SW

    def check(self, tokens: PackedTokens, prepared: Prepared) -> None:
        """Raise RequestError unless the features fit the layout and the model."""
        for name, x_NC, embedder, rows in (
            ("video", tokens.video_NC, self.video_embedder, prepared.counts[0]),
            ("audio", tokens.audio_NC, self.audio_embedder, prepared.counts[1]),
            ("text", tokens.text_NC, self.text_embedder, prepared.counts[2]),
        ):
            channels = embedder.weight.shape[1]
            if x_NC.dtype != torch.float32 or (rows and x_NC.shape != (rows, channels)):
                raise RequestError(
                    f"The {name} features are {x_NC.dtype} {tuple(x_NC.shape)}; expected torch.float32 "
                    f"({rows}, {channels}) for this layout and model."
                )
        time_Tc = tokens.time_Tc
        if time_Tc is not None and time_Tc.shape[0] != prepared.split.total:
            raise RequestError(f"The time embedding has {time_Tc.shape[0]} rows for {prepared.split.total} tokens.")


class PostAdapter(nn.Module):
    """The final norms and linears, fp32 throughout (10 §10)."""

    def __init__(self, config: TransformerConfig, tensors: Tensors) -> None:
        super().__init__()
        self.channels = config.out_channels
        self.final_norm_video = Weight(tensors.at("final_norm_video"))
        self.final_norm_audio = Weight(tensors.at("final_norm_audio"))
        self.final_linear_video = Weight(tensors.at("final_linear_video"))
        self.final_linear_audio = Weight(tensors.at("final_linear_audio"))

    def forward(self, streams_SW: Tensor, prepared: Prepared) -> Tensor:
        """Streams of this rank's rows -> velocity [S, C] fp32 in packed row order; text rows are zero."""
        heads = (
            (self.final_norm_video, self.final_linear_video),
            (self.final_norm_audio, self.final_linear_audio),
        )
        y_SC = torch.zeros((streams_SW.shape[0], self.channels), dtype=torch.float32, device=streams_SW.device)
        for piece in prepared.grouped_pieces:
            if piece.modality >= len(heads):
                continue
            norm, linear = heads[piece.modality]
            y_SC[piece.rows, : linear.weight.shape[0]] = F.linear(
                rms_norm(streams_SW[piece.rows], norm.weight, dtype=torch.float32), linear.weight
            )
        if prepared.order_S is None:
            return y_SC
        return torch.empty_like(y_SC).index_copy_(0, prepared.order_S, y_SC)
