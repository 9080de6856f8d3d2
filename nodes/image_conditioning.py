"""Magi2ImageConditioning: let the clip start from a picture."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..stages.prompt import condition_on_picture, describe_pictures
from ..stages.values import Conditioning
from .comfy import ConditioningType, io, schema, ui
from .progress import NodeEvents


class Magi2ImageConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2ImageConditioning",
            display_name="MAGI-2 Image Conditioning",
            category="MAGI-2",
            description=(
                "Lets the clip start from a picture: the first frame resembles it. The prompt gets the sentence that"
                " ties it to the picture; the picture is fitted, never cropped, and its real size is shown. More"
                " pictures of one size are references that the prompt can name."
            ),
            search_aliases=["magi2 image to video", "magi2 i2v"],
            inputs=[
                ConditioningType.Input(
                    "conditioning", tooltip="From MAGI-2 Encode Prompt, or from another node of this kind."
                ),
                io.Image.Input(
                    "image",
                    tooltip="A picture of any size; it is scaled so that its longer side is the clip's longer side. The"
                    " pictures of a batch are <Figure 1>, <Figure 2> and so on; a second node adds more.",
                ),
            ],
            outputs=[
                ConditioningType.Output(
                    display_name="conditioning", tooltip="The same prompts, tied to the picture, for the sampler."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, conditioning: Conditioning, image: Tensor) -> Any:
        result = condition_on_picture(conditioning, image, events=NodeEvents(cls.hidden.unique_id))
        lines = [*describe_pictures(result), f"{result['tokens']} tokens", *result["warnings"]]
        return io.NodeOutput(result, ui=ui.PreviewText("\n".join(lines)))
