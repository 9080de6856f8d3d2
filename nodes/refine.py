"""Magi2Refine: the latents of a preview to 1080p."""

from __future__ import annotations

from typing import Any

from ..magi2_core.refiner.stage import NOISE_LEVELS, RefinerSettings
from ..magi2_core.refiner.window_attention import BACKENDS
from ..magi2_core.sampling.schedule import MOST_STEPS
from ..stages.checkpoint import check_refiner
from ..stages.refine import CLIPS_OWN, LARGEST_SIDE, refine, refiner_settings
from ..stages.values import ClipLatent, Conditioning, Model
from .checks import first_sentence, sentence_of
from .comfy import ConditioningType, LatentType, ModelType, advanced, io, schema
from .progress import NodeEvents

DEFAULTS = RefinerSettings()


class Magi2Refine(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2Refine",
            display_name="MAGI-2 Refine",
            category="MAGI-2",
            description=(
                "The second stage: takes a 540p clip to 1920x1088 (or 1088x1920) and 25 frames a second. The sound"
                " stays as it is."
            ),
            search_aliases=["magi2 1080p", "magi2 upscale", "magi2 super resolution"],
            inputs=[
                ModelType.Input("model", tooltip="From MAGI-2 Load Checkpoint. The checkpoint needs its refiner/."),
                # lazy: what is missing for 1080p is found before they are made, where ComfyUI comes here first
                LatentType.Input(
                    "latent", lazy=True, tooltip="From MAGI-2 Sampler at 540p, or a saved latent of that kind."
                ),
                ConditioningType.Input("conditioning", lazy=True, tooltip="The one that the sampler had."),
                io.Int.Input(
                    "steps",
                    default=DEFAULTS.steps,
                    min=1,
                    max=MOST_STEPS,
                    optional=True,
                    tooltip="Denoising steps; 5 is the released setting.",
                ),
                io.Float.Input(
                    "video_guidance",
                    default=DEFAULTS.video_txt_guidance_scale,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    optional=True,
                    tooltip="How strongly the picture follows the prompt. 0 takes half of the time and ignores it.",
                ),
                io.Int.Input(
                    "noise_value",
                    default=DEFAULTS.noise_value,
                    min=0,
                    max=NOISE_LEVELS - 1,
                    optional=True,
                    tooltip="How much of the preview is made anew: 0 keeps all of it, 999 nothing.",
                ),
                advanced(
                    io.Float.Input,
                    "shift",
                    default=DEFAULTS.shift,
                    min=0.01,
                    max=100.0,
                    step=0.01,
                    optional=True,
                    tooltip="How much of the schedule is spent at high noise.",
                ),
                advanced(
                    io.Int.Input,
                    "width",
                    default=0,
                    min=0,
                    max=LARGEST_SIDE,
                    step=16,
                    optional=True,
                    tooltip="Own width in pixels, a multiple of 16; 0 for 1920x1088, or 1088x1920 for a tall clip."
                    " Other sizes are untested ground.",
                ),
                advanced(
                    io.Int.Input,
                    "height",
                    default=0,
                    min=0,
                    max=LARGEST_SIDE,
                    step=16,
                    optional=True,
                    tooltip="Own height in pixels; 0 together with width 0.",
                ),
                advanced(
                    io.Float.Input,
                    "audio_noise_scale",
                    default=DEFAULTS.audio_noise_scale,
                    min=-1.0,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    tooltip="Below 0 the refiner does not hear the sound; at 0 it hears it as it is; above 0 with"
                    " noise. The clip keeps its sound in every case.",
                ),
                advanced(
                    io.Float.Input,
                    "audio_guidance",
                    default=DEFAULTS.audio_txt_guidance_scale,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    optional=True,
                    tooltip="Guidance of that sound; only with an audio_noise_scale above 0.",
                ),
                advanced(
                    io.Boolean.Input,
                    "use_cfg_trick",
                    default=DEFAULTS.use_cfg_trick,
                    optional=True,
                    tooltip="Give the first latent frames a lower video guidance.",
                ),
                advanced(
                    io.Int.Input,
                    "cfg_trick_start_frame",
                    default=DEFAULTS.cfg_trick_start_frame,
                    min=0,
                    max=1000,
                    optional=True,
                    tooltip="How many latent frames get it (a refined clip has 63).",
                ),
                advanced(
                    io.Float.Input,
                    "cfg_trick_value",
                    default=DEFAULTS.cfg_trick_value,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    optional=True,
                    tooltip="Their guidance; it can only lower the video guidance.",
                ),
                advanced(
                    io.Int.Input,
                    "refiner_seed",
                    default=CLIPS_OWN,
                    min=CLIPS_OWN,
                    max=0xFFFFFFFFFFFFFFFF,
                    optional=True,
                    tooltip="-1: go on with the noise of the clip's own seed, as the model does. Another number: noise"
                    " of that seed.",
                ),
                advanced(
                    io.Combo.Input,
                    "attention",
                    options=list(BACKENDS),
                    default=DEFAULTS.attention,
                    optional=True,
                    tooltip="How the windows of the attention are computed; all give the same picture. auto is right"
                    " nearly always; flex is torch's compiled kernel, on GPUs alone.",
                ),
            ],
            outputs=[
                LatentType.Output(display_name="latent", tooltip="The refined clip, for MAGI-2 Decode."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, attention: str | None = None
    ) -> bool | str:
        return first_sentence(
            sentence_of(lambda w, h: refiner_settings(width=w, height=h), width, height),
            sentence_of(lambda value: refiner_settings(attention=value), attention),
        )

    @classmethod
    def check_lazy_status(
        cls,
        model: Model,
        latent: ClipLatent | None = None,
        conditioning: Conditioning | None = None,
        **settings: Any,
    ) -> list[str]:
        check_refiner(model)
        return [name for name, value in (("latent", latent), ("conditioning", conditioning)) if value is None]

    @classmethod
    def execute(cls, model: Model, latent: ClipLatent, conditioning: Conditioning, **settings: Any) -> Any:
        events = NodeEvents(cls.hidden.unique_id)
        return io.NodeOutput(refine(model, latent, conditioning, **settings, events=events))
