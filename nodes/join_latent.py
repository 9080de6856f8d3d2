"""Magi2JoinLatent: a core LATENT back to ours."""

from __future__ import annotations

from typing import Any

from ..stages.latent import join_latent
from ..stages.values import ClipLatent
from .comfy import LatentType, io, schema


class Magi2JoinLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2JoinLatent",
            display_name="MAGI-2 Join Latent",
            category="MAGI-2/latent",
            description="Takes a core video latent in the Wan 2.2 scale, and the sound of a MAGI-2 latent, together.",
            inputs=[
                io.Latent.Input("latent", tooltip="A video latent in core's Wan 2.2 scale, one clip."),
                LatentType.Input(
                    "sound_from", optional=True, tooltip="Take sound and settings from this one; without it, no sound."
                ),
            ],
            outputs=[LatentType.Output(display_name="magi2_latent", tooltip="For MAGI-2 Decode or Save Latent.")],
        )

    @classmethod
    def execute(cls, latent: dict[str, Any], sound_from: ClipLatent | None = None) -> Any:
        return io.NodeOutput(join_latent(latent, sound_from))
