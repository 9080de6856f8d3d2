"""Magi2Decode: latents to frames, sound and a finished clip."""

from __future__ import annotations

from typing import Any

from ..magi2_core.errors import check_choice
from ..stages.decode import (
    LARGEST_SIDE,
    MAKE_FRAMES,
    PARTS,
    audio_from_waveform,
    check_output_size,
    decode,
    describe_clip,
    image_from_frames,
)
from ..stages.manager import manager
from ..stages.values import ClipLatent, Model
from .checks import first_sentence, sentence_of
from .clip_video import clip_video
from .comfy import (
    LatentType,
    ModelType,
    advanced,
    folders,
    io,
    missing_output,
    schema,
    show_text,
    ui,
    video_file,
)
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
                LatentType.Input("latent", tooltip="From MAGI-2 Sampler, Refine, Load Latent or Join Latent."),
                io.Combo.Input(
                    "parts",
                    options=list(PARTS),
                    default=PARTS[0],
                    optional=True,
                    tooltip="Decode only one half if that is all you need; nodes that are connected to the other half"
                    " do not run.",
                ),
                io.Combo.Input(
                    "make_frames",
                    options=list(MAKE_FRAMES),
                    default=MAKE_FRAMES[0],
                    optional=True,
                    tooltip="auto: frames for clips up to 540p; larger ones go straight to the video, because the"
                    " frames of a 1080p clip take 6.2 GB of memory. always: frames of every clip. never: only the"
                    " video.",
                ),
                advanced(
                    io.Int.Input,
                    "output_width",
                    default=0,
                    min=0,
                    max=LARGEST_SIDE,
                    step=2,
                    optional=True,
                    tooltip="Rescale the finished frames, for instance 1920x1088 to 1920 wide and 1080 high; 0 keeps"
                    " the clip's size. The shape is not kept.",
                ),
                advanced(
                    io.Int.Input,
                    "output_height",
                    default=0,
                    min=0,
                    max=LARGEST_SIDE,
                    step=2,
                    optional=True,
                    tooltip="The height to rescale to; 0 together with width 0.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="frames", tooltip="All frames: 125 of a preview, 249 of 1080p."),
                io.Audio.Output(display_name="sound", tooltip="Stereo at 44.1 kHz, ten seconds."),
                io.Video.Output(display_name="video", tooltip="Frames and sound together, for Save Video."),
                io.Float.Output(display_name="fps", tooltip="Frames a second: 12.5 of a preview, 25 of 1080p."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls,
        parts: str | None = None,
        make_frames: str | None = None,
        output_width: int | None = None,
        output_height: int | None = None,
    ) -> bool | str:
        return first_sentence(
            sentence_of(lambda value: check_choice("parts", value, PARTS), parts),
            sentence_of(lambda value: check_choice("make_frames", value, MAKE_FRAMES), make_frames),
            sentence_of(check_output_size, output_width, output_height),
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> int:
        """Changes when a clip that was decoded into a temporary file is gone: ComfyUI would go on handing it out."""
        return sum(not file.exists() for file in manager.clips)

    @classmethod
    def execute(
        cls,
        model: Model,
        latent: ClipLatent,
        parts: str = PARTS[0],
        make_frames: str = MAKE_FRAMES[0],
        output_width: int = 0,
        output_height: int = 0,
    ) -> Any:
        events = NodeEvents(cls.hidden.unique_id)
        clip = decode(
            model, latent, parts, make_frames, output_width, output_height, events=events, folders=folders()
        )  # fmt: skip
        sound = None
        if clip.waveform is not None:
            sound = audio_from_waveform(clip.waveform, clip.sample_rate)
        frames = movie = missing_output()
        text = None
        if clip.frames is not None:
            frames = image_from_frames(clip.frames)
            movie = clip_video(frames, sound, clip.fps)
        elif clip.file is not None:
            text = describe_clip(clip)
            show_text(text, cls.hidden.unique_id)
            frames, movie = missing_output(text), video_file(clip.file)
        return io.NodeOutput(
            frames,
            missing_output() if sound is None else sound,
            movie,
            float(clip.fps),
            ui=ui.PreviewText(text) if text else None,
        )
