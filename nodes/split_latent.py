"""Magi2SplitLatent: the video part as a core LATENT."""

from __future__ import annotations

from typing import Any

from ..stages.latent import split_latent
from ..stages.values import ClipLatent
from .comfy import LatentType, io, schema


class Magi2SplitLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2SplitLatent",
            display_name="MAGI-2 Split Latent",
            category="MAGI-2/latent",
            description=(
                "Gives the video latent to core nodes, in the scale of the Wan 2.2 VAE: VAE Decode, latent upscalers"
                " and savers read it. The sound stays with MAGI-2 nodes; core's audio VAE would play it too slowly."
            ),
            inputs=[LatentType.Input("magi2_latent", tooltip="From MAGI-2 Sampler, Refine or Load Latent.")],
            outputs=[io.Latent.Output(display_name="latent", tooltip="Video latent in core's Wan 2.2 scale.")],
        )

    @classmethod
    def execute(cls, magi2_latent: ClipLatent) -> Any:
        return io.NodeOutput(split_latent(magi2_latent))
