"""Magi2Sampler: conditioning to the latents of a ten-second clip."""

from __future__ import annotations

from typing import Any

from ..magi2_core.errors import check_choice
from ..magi2_core.sampling.geometry import ORIENTATIONS
from ..magi2_core.sampling.guidance import HELP
from ..magi2_core.sampling.schedule import MOST_STEPS
from ..stages.sample import DEFAULTS, RESOLUTIONS, sample
from ..stages.values import Conditioning, Model, SamplerOptions
from .checks import first_sentence, sentence_of
from .comfy import ConditioningType, LatentType, ModelType, OptionsType, io, schema
from .progress import NodeEvents


class Magi2Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2Sampler",
            display_name="MAGI-2 Sampler",
            category="MAGI-2",
            description=(
                "Generates the latents of a ten-second clip with stereo sound. Shows the time left and a moving"
                " preview; can be cancelled at any step."
            ),
            search_aliases=["magi2 ksampler", "magi2 video"],
            inputs=[
                ModelType.Input("model", tooltip="From MAGI-2 Load Checkpoint."),
                ConditioningType.Input(
                    "conditioning", tooltip="From MAGI-2 Encode Prompt, or from MAGI-2 Image Conditioning."
                ),
                io.Combo.Input(
                    "resolution",
                    options=list(RESOLUTIONS),
                    default=RESOLUTIONS[-1],
                    tooltip="272p: 448x256, a quick look. 540p: 896x512, four times the pixels and eight times the"
                    " work.",
                ),
                io.Combo.Input(
                    "orientation",
                    options=list(ORIENTATIONS),
                    default=ORIENTATIONS[0],
                    tooltip="landscape is wide, portrait is tall. The shape of a picture does not change it.",
                ),
                io.Int.Input(
                    "seed",
                    default=42,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The same seed and settings give the same clip. Seeds above 2^53 are exact only through the"
                    " API.",
                ),
                io.Int.Input(
                    "steps",
                    default=DEFAULTS.steps,
                    min=1,
                    max=MOST_STEPS,
                    tooltip="Denoising steps. The time grows with them; 100 is the released setting.",
                ),
                io.Float.Input(
                    "video_guidance",
                    default=DEFAULTS.guidance.video_txt_guidance_scale,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip=HELP["video_txt_guidance_scale"],
                ),
                io.Float.Input(
                    "audio_guidance",
                    default=DEFAULTS.guidance.audio_txt_guidance_scale,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip=HELP["audio_txt_guidance_scale"],
                ),
                io.Float.Input(
                    "shift",
                    default=DEFAULTS.shift,
                    min=0.01,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of the schedule is spent at high noise, where movement is decided. 1 is linear.",
                ),
                OptionsType.Input(
                    "options", optional=True, tooltip="Settings that are seldom needed, from MAGI-2 Sampler Options."
                ),
            ],
            outputs=[
                LatentType.Output(
                    display_name="latent", tooltip="The clip's video and sound latents, and what made them."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, resolution: str | None = None, orientation: str | None = None) -> bool | str:
        # numbers are not named here: ComfyUI then holds them to the limits of their widgets (60 §2)
        return first_sentence(
            sentence_of(lambda value: check_choice("resolution", value, RESOLUTIONS), resolution),
            sentence_of(lambda value: check_choice("orientation", value, ORIENTATIONS), orientation),
        )

    @classmethod
    def execute(
        cls,
        model: Model,
        conditioning: Conditioning,
        resolution: str,
        orientation: str,
        seed: int,
        steps: int,
        video_guidance: float,
        audio_guidance: float,
        shift: float,
        options: SamplerOptions | None = None,
    ) -> Any:
        events = NodeEvents(cls.hidden.unique_id)
        latent = sample(
            model, conditioning, resolution, orientation, seed, steps, video_guidance, audio_guidance, shift, options,
            events=events,
        )  # fmt: skip
        return io.NodeOutput(latent)
