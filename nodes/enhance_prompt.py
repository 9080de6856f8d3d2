"""Magi2EnhancePrompt: a short prompt to a structured caption, by a language model of the user's choice."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..magi2_core.errors import check_choice
from ..stages.enhance import (
    MOST_VARIATIONS,
    ON_FAILURE,
    check_variation,
    describe_enhanced,
    enhance_identity,
    enhance_prompt,
)
from ..stages.prompt import check_prompt
from .checks import first_sentence, sentence_of
from .comfy import folders, io, schema, show_text, ui
from .progress import NodeEvents


class Magi2EnhancePrompt(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2EnhancePrompt",
            display_name="MAGI-2 Enhance Prompt",
            category="MAGI-2",
            description=(
                "Sends a short prompt, and a picture if one is connected, to the language model that you have set up,"
                " and gets a full caption back. Nothing is sent anywhere without that set-up; see this node's help."
            ),
            search_aliases=["magi2 prompt enhancement", "magi2 prompt expansion", "magi2 llm"],
            inputs=[
                io.String.Input(
                    "prompt",
                    multiline=True,
                    dynamic_prompts=False,
                    default="",
                    tooltip="The clip in a line or two. It is sent to the language model as it is.",
                ),
                io.Combo.Input(
                    "on_failure",
                    options=list(ON_FAILURE),
                    default=ON_FAILURE[0],
                    optional=True,
                    tooltip="stop: end the run with a message. original: go on with the prompt as it is, with a"
                    " warning.",
                ),
                io.Int.Input(
                    "variation",
                    default=0,
                    min=0,
                    max=MOST_VARIATIONS,
                    optional=True,
                    tooltip="Another number asks for another caption of the same prompt. The same number gives the same"
                    " caption again, without asking.",
                ),
                io.Image.Input(
                    "image",
                    optional=True,
                    tooltip="The picture that the clip starts from. It is sent along, and the caption continues it.",
                ),
            ],
            outputs=[
                io.String.Output(display_name="prompt", tooltip="The caption as text, for MAGI-2 Encode Prompt."),
                io.String.Output(
                    display_name="caption", tooltip="The caption as JSON, for MAGI-2 Caption, where it can be edited."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(
        cls, prompt: str | None = None, on_failure: str | None = None, variation: int | None = None
    ) -> bool | str:
        return first_sentence(
            sentence_of(lambda text: check_prompt(text, ""), prompt),
            sentence_of(lambda value: check_choice("on_failure", value, ON_FAILURE), on_failure),
            sentence_of(check_variation, variation),
        )

    @classmethod
    def fingerprint_inputs(cls, prompt: str | None = None, variation: int | None = None, **others: Any) -> Any:
        return enhance_identity(prompt, variation, folders())

    @classmethod
    def execute(
        cls, prompt: str, on_failure: str = ON_FAILURE[0], variation: int = 0, image: Tensor | None = None
    ) -> Any:
        events = NodeEvents(cls.hidden.unique_id)
        made = enhance_prompt(prompt, on_failure, variation, image, events=events, folders=folders())
        text = describe_enhanced(made, folders())
        show_text(text, cls.hidden.unique_id)
        # a prompt that was used as it is stands for a caption too: MAGI-2 Caption takes plain text
        return io.NodeOutput(made.prompt, made.caption_json or made.prompt, ui=ui.PreviewText(text))
