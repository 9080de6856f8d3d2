"""Magi2SamplerOptions: the sampler's settings that are seldom touched."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from ..magi2_core.sampling.guidance import HELP
from ..magi2_core.sampling.noise import NOISE_DEVICES
from ..stages.sample import LARGEST_SIDE, OPTION_FIELDS, sampler_options
from .checks import first_sentence, sentence_of
from .comfy import OptionsType, io, schema

# What ComfyUI lets through for inputs that validate_inputs does not name (60 §2); the settings check themselves.
LIMITS = {
    "cfg_trick_start_frame": (0, 1000),
    "cfg_trick_value": (-100.0, 100.0),
    "dynamic_cfg_start_t": (0, 1000),
    "dynamic_cfg_cutoff_value": (-100.0, 100.0),
    "skimmed_cfg_scale": (0.0, 100.0),
    "cfg_rescale": (0.0, 10.0),
}


class Magi2SamplerOptions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2SamplerOptions",
            display_name="MAGI-2 Sampler Options",
            category="MAGI-2",
            description=(
                "Own sizes, the noise device, and variants of the guidance. The defaults are the released settings."
            ),
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
                *(_guidance_input(field) for field in OPTION_FIELDS),
            ],
            outputs=[OptionsType.Output(display_name="options", tooltip="For the MAGI-2 Sampler.")],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, noise_device: str | None = None
    ) -> bool | str:
        return first_sentence(
            sentence_of(lambda w, h: sampler_options(w, h), width, height),
            sentence_of(lambda value: sampler_options(noise_device=value), noise_device),
        )

    @classmethod
    def execute(cls, width: int, height: int, noise_device: str, **guidance: Any) -> Any:
        return io.NodeOutput(sampler_options(width, height, noise_device, **guidance))


def _guidance_input(field: Field[Any]) -> Any:
    common = {"default": field.default, "tooltip": HELP[field.name]}
    if isinstance(field.default, bool):
        return io.Boolean.Input(field.name, **common)
    low, high = LIMITS[field.name]
    if isinstance(field.default, int):
        return io.Int.Input(field.name, min=low, max=high, **common)
    return io.Float.Input(field.name, min=low, max=high, step=0.01, **common)
