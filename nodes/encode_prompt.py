"""Magi2EncodePrompt: both prompts to conditioning."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from ..magi2_core.conditioning.negative import default_negative_prompt
from ..magi2_core.errors import RequestError
from ..stages.prompt import check_prompt, encode_prompt
from ..stages.values import Model
from .checks import first_sentence, sentence_of
from .comfy import ConditioningType, ModelType, io, schema, ui, user_folder
from .progress import NodeEvents

logger = logging.getLogger("magi2")


class Magi2EncodePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2EncodePrompt",
            display_name="MAGI-2 Encode Prompt",
            category="MAGI-2",
            description=(
                "Encodes what the clip should show and sound like, and what to stay away from. Plain text, or a"
                " structured caption in JSON. An unchanged prompt is not encoded again."
            ),
            search_aliases=["magi2 text encode", "magi2 prompt"],
            inputs=[
                ModelType.Input("model", tooltip="From MAGI-2 Load Checkpoint."),
                # 30 §12: dynamic prompts would rewrite {a|b} and strip //, which destroys JSON captions
                io.String.Input(
                    "prompt",
                    multiline=True,
                    dynamic_prompts=False,
                    default="",
                    tooltip="Describe the picture, the movement, the camera, the sounds and what is said. Long"
                    " prompts work best; up to 7000 tokens are used.",
                ),
                io.String.Input(
                    "negative_prompt",
                    multiline=True,
                    dynamic_prompts=False,
                    default=_negative_prompt(),
                    tooltip="What the clip should not be like. Leave it empty for no text at all in that branch.",
                ),
                io.Boolean.Input(
                    "for_picture",
                    default=False,
                    optional=True,
                    tooltip="Turn on if MAGI-2 Image Conditioning follows: the sentence about the first frame is added"
                    " now, so the prompt need not be encoded a second time.",
                ),
            ],
            outputs=[
                ConditioningType.Output(display_name="conditioning", tooltip="The encoded prompts, for the sampler."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, prompt: str | None = None, negative_prompt: str | None = None) -> bool | str:
        return first_sentence(
            sentence_of(lambda text: check_prompt(text, ""), prompt),
            sentence_of(lambda text: check_prompt("-", text), negative_prompt),
        )

    @classmethod
    def execute(cls, model: Model, prompt: str, negative_prompt: str, for_picture: bool = False) -> Any:
        events = NodeEvents(cls.hidden.unique_id)
        conditioning = encode_prompt(model, prompt, negative_prompt, for_picture, events=events)
        lines = [f"{conditioning['tokens']} tokens", *conditioning["warnings"]]
        return io.NodeOutput(conditioning, ui=ui.PreviewText("\n".join(lines)))


def _negative_prompt() -> str:
    """The user's text, or the pack's where that cannot be read: a schema that raises would cost more than this node."""
    try:
        return default_negative_prompt(user_folder())
    except RequestError as error:
        _warn(f"{error} The negative prompt of the pack is offered instead.")
        return default_negative_prompt()


@lru_cache
def _warn(text: str) -> None:
    logger.warning(text)  # once: ComfyUI asks for the schema again and again
