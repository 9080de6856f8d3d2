"""Magi2Caption: a structured caption from a form, from a caption to start from, or from both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..magi2_core.errors import check_choice
from ..stages.caption import FORMS, check_caption, make_caption
from .checks import first_sentence, sentence_of
from .comfy import ModelType, advanced, io, missing_output, schema, show_text, ui

FOLDED = partial(advanced, io.String.Input)


class Magi2Caption(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> Any:
        return schema(
            node_id="Magi2Caption",
            display_name="MAGI-2 Caption",
            category="MAGI-2",
            description=(
                "Makes a structured caption, which is what the model was trained on, from what you fill in, or changes"
                " one that comes from MAGI-2 Enhance Prompt. Shows the text that the encoder will really see."
            ),
            search_aliases=["magi2 structured prompt", "magi2 json prompt"],
            inputs=[
                _line("context", "What kind of moment this is, in a few words.", "A potter at work, quiet and close"),
                _text("description", "The whole clip in some sentences: who, where, what happens, how it looks.", ""),
                _text(
                    "subjects",
                    "People and animals, one a line: description | clothing | position. They become <subject 1>,"
                    " <subject 2> and so on.",
                    "a woman in her sixties | grey apron | centre, behind the wheel",
                ),
                _text(
                    "timeline",
                    "What happens, one segment a line, with its time in seconds: 0-5 she centres the clay. Without"
                    " times the ten seconds are divided evenly.",
                    "0-5 she centres the clay\n5-10 the bowl opens under her thumbs",
                ),
                _text(
                    "dialogue",
                    "What is said, one line each: 3-4.5 <subject 1>: the words | how it is said. The time may be left"
                    " out; about two or three words fit into a second.",
                    "3-4.5 <subject 1>: Slowly now. | softly",
                ),
                _line("language", "The language of what is said.", "French"),
                _line("ambience", "What is heard beside speech: places, things, weather, music or none.",
                      "the wheel hums, wet clay, no music"),
                _line("style", "The look: photograph, film, drawing ...", "natural documentary photograph"),
                _line("mood", "The mood of the clip.", "calm", FOLDED),
                _line("colors", "The colours that lead.", "clay, grey and warm white", FOLDED),
                _line("camera", "How the camera is used throughout.", "static medium close-up at eye level", FOLDED),
                _line("light", "The light.", "soft window light from the left", FOLDED),
                _line("setting", "The place behind everything.", "a small pottery with shelves of pots", FOLDED),
                _text(
                    "objects",
                    "Things that matter, one a line: description | shape and colour | position.",
                    "a potter's wheel | round, grey | centre",
                    FOLDED,
                ),
                _line("aspect_ratio", "Shape of the picture, for the caption alone; 16:9 if left empty.", "16:9",
                      FOLDED),
                io.Combo.Input(
                    "form",
                    options=list(FORMS),
                    default=FORMS[0],
                    optional=True,
                    tooltip="markdown: the encoder sees every field. compact: it sees a few lines, without light,"
                    " setting, camera and other details; only for text-to-video captions.",
                ),
                _text(
                    "edited_caption",
                    "Your own version of the caption, as JSON; plain text and Markdown are used as they are. When"
                    " something is written here, it is used alone: not the linked caption, and not the fields above.",
                    "Empty: the linked caption, and the fields above",
                ),
                io.Boolean.Input(
                    "stop_to_edit",
                    default=False,
                    optional=True,
                    tooltip="Show the caption and run nothing after this node, as long as edited_caption is empty. Copy"
                    " the caption there, change it, and run again.",
                ),
                advanced(
                    io.Boolean.Input,
                    "for_picture",
                    default=False,
                    optional=True,
                    tooltip="Show the text with the sentence about the first frame, which MAGI-2 Encode Prompt adds for"
                    " a picture. Changes only what is shown.",
                ),
                io.String.Input(
                    "caption",
                    optional=True,
                    force_input=True,
                    tooltip="A caption to start from, from MAGI-2 Enhance Prompt. What is filled in above is laid over"
                    " it.",
                ),
                ModelType.Input(
                    "model", optional=True, tooltip="Connect it to have the tokens counted with the model's tokenizer."
                ),
            ],
            outputs=[
                io.String.Output(display_name="prompt", tooltip="For MAGI-2 Encode Prompt."),
                io.String.Output(display_name="caption", tooltip="The caption as JSON, for another look or edit."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(
        cls,
        subjects: str | None = None,
        timeline: str | None = None,
        dialogue: str | None = None,
        form: str | None = None,
        edited_caption: str | None = "",
    ) -> bool | str:
        lines = {"subjects": subjects or "", "timeline": timeline or "", "dialogue": dialogue or ""}
        return first_sentence(
            sentence_of(lambda value: check_choice("form", value, FORMS), form),
            sentence_of(lambda text: check_caption(text, **lines), edited_caption),
        )

    @classmethod
    def execute(cls, **inputs: Any) -> Any:
        made = make_caption(**inputs)
        text = made.describe()
        show_text(text, cls.hidden.unique_id)
        outputs = (missing_output(), missing_output()) if made.stopped else (made.prompt, made.caption)
        # "caption" is what the page's edit button puts into edited_caption
        return io.NodeOutput(*outputs, ui={**ui.PreviewText(text).as_dict(), "caption": (made.caption,)})


def _line(name: str, tooltip: str, example: str, make: Callable[..., Any] = io.String.Input) -> Any:
    return make(name, default="", optional=True, placeholder=example, tooltip=tooltip)


def _text(name: str, tooltip: str, example: str, make: Callable[..., Any] = io.String.Input) -> Any:
    # 30 §12: dynamic prompts would rewrite {a|b} and strip //, which destroys captions
    return make(
        name, default="", optional=True, multiline=True, dynamic_prompts=False, placeholder=example, tooltip=tooltip
    )  # fmt: skip
