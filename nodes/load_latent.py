"""Magi2LoadLatent: latents that MAGI-2 Save Latent kept."""

from __future__ import annotations

from typing import Any

from ..magi2_core.errors import RequestError
from ..stages.latent import latent_names, load_latent, resolve_latent
from .checks import sentence_of
from .comfy import LatentType, folders, io, schema


class Magi2LoadLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2LoadLatent",
            display_name="MAGI-2 Load Latent",
            category="MAGI-2/latent",
            description="Loads what MAGI-2 Save Latent wrote into the output folder.",
            inputs=[
                io.Combo.Input(
                    "latent",
                    options=latent_names(folders()),
                    tooltip="The newest first. Through the API, any saved latent below the output or input folder.",
                )
            ],
            outputs=[
                LatentType.Output(display_name="magi2_latent", tooltip="For MAGI-2 Decode, Refine or Split Latent.")
            ],
        )

    @classmethod
    def validate_inputs(cls, latent: str | None = None) -> bool | str:
        return sentence_of(lambda name: resolve_latent(name, folders()), latent)

    @classmethod
    def fingerprint_inputs(cls, latent: str | None = None) -> Any:
        if latent is None:  # linked: the node that gives it is part of the key
            return None
        try:
            status = resolve_latent(latent, folders()).stat()
        except (RequestError, OSError):
            return latent
        return latent, status.st_size, status.st_mtime_ns

    @classmethod
    def execute(cls, latent: str) -> Any:
        return io.NodeOutput(load_latent(latent, folders=folders()))
