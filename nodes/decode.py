"""Magi2Decode: latents to frames, sound and a finished clip."""

from __future__ import annotations

from typing import Any

from ..stages.checkpoint import check_choice
from ..stages.decode import PARTS, audio_from_waveform, decode, image_from_frames
from ..stages.values import ClipLatent, Model
from .checks import sentence_of
from .comfy import LatentType, ModelType, io, missing_output, schema, video
from .progress import NodeEvents


class Magi2Decode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2Decode",
            display_name="MAGI-2 Decode",
            category="MAGI-2",
            description=(
                "Decodes a clip: frames, stereo sound, and both together as a video with the right frame rate for"
                " Save Video."
            ),
            search_aliases=["magi2 vae decode"],
            inputs=[
                ModelType.Input("model", tooltip="From MAGI-2 Load Checkpoint."),
                LatentType.Input("latent", tooltip="From MAGI-2 Sampler, Load Latent or Join Latent."),
                io.Combo.Input(
                    "parts",
                    options=list(PARTS),
                    default=PARTS[0],
                    optional=True,
                    tooltip="Decode only one half if that is all you need; the outputs of the other half stay empty.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="frames", tooltip="All frames: 125 for ten seconds at 12.5 a second."),
                io.Audio.Output(display_name="sound", tooltip="Stereo at 44.1 kHz, ten seconds."),
                io.Video.Output(display_name="video", tooltip="Frames and sound together, for Save Video."),
                io.Float.Output(display_name="fps", tooltip="Frames a second: 12.5."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, parts: str | None = None) -> bool | str:
        return sentence_of(lambda value: check_choice("parts", value, PARTS), parts)

    @classmethod
    def execute(cls, model: Model, latent: ClipLatent, parts: str = PARTS[0]) -> Any:
        clip = decode(model, latent, parts, events=NodeEvents(cls.hidden.unique_id))
        frames = sound = None
        if clip.frames is not None:
            frames = image_from_frames(clip.frames)
        if clip.waveform is not None:
            sound = audio_from_waveform(clip.waveform, clip.sample_rate)
        return io.NodeOutput(
            missing_output() if frames is None else frames,
            missing_output() if sound is None else sound,
            missing_output() if frames is None else video(frames, sound, clip.fps),
            float(clip.fps),
        )
