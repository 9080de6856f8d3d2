"""Magi2SaveLatent: keep a clip's latents in the output folder."""

from __future__ import annotations

from typing import Any

from ..stages.folders import check_prefix
from ..stages.latent import SUBFOLDER, write_latent
from ..stages.values import ClipLatent
from .checks import sentence_of
from .comfy import LatentType, io, save_path, schema, ui


class Magi2SaveLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2SaveLatent",
            display_name="MAGI-2 Save Latent",
            category="MAGI-2/latent",
            description="Saves video and sound latents as one safetensors file, to decode or refine them later.",
            inputs=[
                LatentType.Input("magi2_latent", tooltip="From MAGI-2 Sampler, Refine or Join Latent."),
                io.String.Input(
                    "filename_prefix",
                    default=f"{SUBFOLDER}/latent",
                    tooltip="Folder and start of the name below the output folder; a number is added.",
                ),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        return sentence_of(check_prefix, filename_prefix)

    @classmethod
    def execute(cls, magi2_latent: ClipLatent, filename_prefix: str) -> Any:
        path, subfolder = save_path(filename_prefix, ".safetensors")
        extra = {"prompt": cls.hidden.prompt, **(cls.hidden.extra_pnginfo or {})}
        write_latent(magi2_latent, path, {key: value for key, value in extra.items() if value is not None})
        saved = {"filename": path.name, "subfolder": subfolder, "type": "output"}
        name = f"{subfolder}/{path.name}" if subfolder else path.name
        return io.NodeOutput(ui={"latents": [saved], **ui.PreviewText(name).as_dict()})
