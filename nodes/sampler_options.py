"""Magi2SamplerOptions: the sampler's settings that are seldom touched."""

from __future__ import annotations

from typing import Any

from ..magi2_core.sampling.guidance import GuidanceSettings
from ..magi2_core.sampling.noise import NOISE_DEVICES
from ..stages.sample import LARGEST_SIDE, sampler_options
from .checks import sentence_of
from .comfy import OptionsType, io, schema

DEFAULTS = GuidanceSettings()


class Magi2SamplerOptions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2SamplerOptions",
            display_name="MAGI-2 Sampler Options",
            category="MAGI-2",
            description="Own sizes, the noise device, and variants of the guidance. All of them are off as shipped.",
            inputs=[
                io.Int.Input(
                    "width",
                    default=0,
                    min=0,
                    max=LARGEST_SIDE,
                    step=16,
                    tooltip="Own width in pixels, a multiple of 16 and at least 32; 0 for the resolution's own. Sizes"
                    " other than the model's two are untested ground.",
                ),
                io.Int.Input(
                    "height",
                    default=0,
                    min=0,
                    max=LARGEST_SIDE,
                    step=16,
                    tooltip="Own height in pixels; 0 together with width 0.",
                ),
                io.Combo.Input(
                    "noise_device",
                    options=list(NOISE_DEVICES),
                    default=NOISE_DEVICES[0],
                    tooltip="cpu: a seed gives the same noise on every machine. cuda: the reference's noise, which"
                    " depends on the GPU model.",
                ),
                io.Boolean.Input(
                    "use_ref_for_uncond",
                    default=DEFAULTS.use_ref_for_uncond,
                    tooltip="Show the picture to the unconditional branch too. Off: it sees zeros there.",
                ),
                io.Boolean.Input(
                    "use_cfg_trick",
                    default=DEFAULTS.use_cfg_trick,
                    tooltip="Give the first latent frames a lower video guidance.",
                ),
                io.Int.Input(
                    "cfg_trick_start_frame",
                    default=DEFAULTS.cfg_trick_start_frame,
                    min=0,
                    max=1000,
                    tooltip="How many latent frames, counted from the first, get the lower guidance (a clip has 32).",
                ),
                io.Float.Input(
                    "cfg_trick_value",
                    default=DEFAULTS.cfg_trick_value,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="Their guidance; it can only lower the video guidance.",
                ),
                io.Boolean.Input(
                    "use_dynamic_cfg",
                    default=DEFAULTS.use_dynamic_cfg,
                    tooltip="Limit the video guidance in the later steps.",
                ),
                io.Int.Input(
                    "dynamic_cfg_start_t",
                    default=DEFAULTS.dynamic_cfg_start_t,
                    min=0,
                    max=1000,
                    tooltip="Timestep below which the limit holds (1000 is pure noise, 0 the finished clip).",
                ),
                io.Float.Input(
                    "dynamic_cfg_cutoff_value",
                    default=DEFAULTS.dynamic_cfg_cutoff_value,
                    min=-100.0,
                    max=100.0,
                    step=0.01,
                    tooltip="The limit.",
                ),
                io.Boolean.Input(
                    "use_skimmed_cfg_linear",
                    default=DEFAULTS.use_skimmed_cfg_linear,
                    tooltip="Tame the guidance where it would overshoot (skimmed guidance), for video and sound.",
                ),
                io.Float.Input(
                    "skimmed_cfg_scale",
                    default=DEFAULTS.skimmed_cfg_scale,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    tooltip="The guidance that remains there.",
                ),
                io.Float.Input(
                    "cfg_rescale",
                    default=DEFAULTS.cfg_rescale,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    tooltip="Bring the contrast back towards the unguided one; useful from 0 (off) to 1.",
                ),
            ],
            outputs=[OptionsType.Output(display_name="options", tooltip="For the MAGI-2 Sampler.")],
        )

    @classmethod
    def validate_inputs(
        cls,
        width: int | None = None,
        height: int | None = None,
        noise_device: str | None = None,
        cfg_trick_start_frame: int | None = None,
        cfg_trick_value: float | None = None,
        dynamic_cfg_start_t: int | None = None,
        dynamic_cfg_cutoff_value: float | None = None,
        skimmed_cfg_scale: float | None = None,
        cfg_rescale: float | None = None,
    ) -> bool | str:
        numbers = {
            "cfg_trick_start_frame": cfg_trick_start_frame,
            "cfg_trick_value": cfg_trick_value,
            "dynamic_cfg_start_t": dynamic_cfg_start_t,
            "dynamic_cfg_cutoff_value": dynamic_cfg_cutoff_value,
            "skimmed_cfg_scale": skimmed_cfg_scale,
            "cfg_rescale": cfg_rescale,
        }
        known: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
        size = (width, height) if width is not None and height is not None else (0, 0)
        return sentence_of(lambda: sampler_options(*size, noise_device or NOISE_DEVICES[0], **known))

    @classmethod
    def execute(cls, width: int, height: int, noise_device: str, **guidance: Any) -> Any:
        return io.NodeOutput(sampler_options(width, height, noise_device, **guidance))
