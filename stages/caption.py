"""A structured caption from plain lines, from a caption that is there already, or from both (30 §8)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..magi2_core.checkpoint.folder import TEXT_ENCODER
from ..magi2_core.conditioning.caption_lines import read_timeline
from ..magi2_core.conditioning.compact import normalise
from ..magi2_core.conditioning.markdown import render_markdown
from ..magi2_core.conditioning.markers import insert_marker
from ..magi2_core.conditioning.prompt import check_text, prepare_prompt
from ..magi2_core.conditioning.tokenizer import TOKEN_LIMIT, PromptTokenizer
from ..magi2_core.errors import CheckpointError, MissingDependencyError, RequestError, check_choice
from ..magi2_core.sampling.geometry import SECONDS
from .values import Model

if TYPE_CHECKING:
    from ..magi2_core.conditioning.compose import CaptionForm

FORMS = ("markdown", "compact")
SHOWN_PROBLEMS = 3


@dataclass(frozen=True)
class Captioned:
    """A caption ready to be encoded.

    prompt: for Magi2EncodePrompt. caption: the same as JSON, for editing; plain text if that is what it is. seen: the
    text that the encoder sees. tokens: how many it is cut into, before the limit; None if they could not be counted.
    stopped: the caption waits to be edited, and is not to be used yet.
    """

    prompt: str
    caption: str
    seen: str
    tokens: int | None
    warnings: tuple[str, ...]
    stopped: bool

    def describe(self) -> str:
        """What the node shows."""
        count = "" if self.tokens is None else f"{self.tokens} of at most {TOKEN_LIMIT} tokens."
        lines = [line for line in (count, *self.warnings) if line]
        if self.stopped:
            stop = "Stopped here: copy this caption into edited_caption, change it there, and run again."
            return "\n".join([*lines, stop, "", self.caption])
        return "\n".join([*lines, "The encoder sees:", "", self.seen])


def make_caption(
    context: str = "",
    description: str = "",
    subjects: str = "",
    objects: str = "",
    timeline: str = "",
    dialogue: str = "",
    language: str = "",
    ambience: str = "",
    style: str = "",
    mood: str = "",
    colors: str = "",
    camera: str = "",
    light: str = "",
    setting: str = "",
    aspect_ratio: str = "",
    form: str = FORMS[0],
    edited_caption: str = "",
    stop_to_edit: bool = False,
    for_picture: bool = False,
    caption: str | None = None,
    model: Model | None = None,
) -> Captioned:
    """Compose a caption; the fields are those of `compose.CaptionForm`.

    `edited_caption` is used as it is. Else the fields that are filled in are laid over `caption`; without one it is
    made of the fields alone. `for_picture` shows the text as it is encoded for a picture. Tokens are counted with the
    tokenizer of `model`. RequestError for anything that cannot be understood.
    """
    check_choice("form", form, FORMS)
    fields = _form(context=context, description=description, subjects=subjects, objects=objects, timeline=timeline,
                   dialogue=dialogue, language=language, ambience=ambience, style=style, mood=mood, colors=colors,
                   camera=camera, light=light, setting=setting, aspect_ratio=aspect_ratio)  # fmt: skip
    edited = bool(edited_caption.strip())
    made = _build(_form(), edited_caption) if edited else _build(fields, caption or "")
    if isinstance(made, str):
        prompt, text, warnings = made, made, []
    else:
        prompt, text, warnings = _render(made, form), json.dumps(made, ensure_ascii=False, indent=2), _problems(made)
    seen, tokens, more = _seen(prompt, for_picture, model)
    if not edited:
        warnings += _left_out(timeline)
    return Captioned(prompt, text, seen, tokens, (*warnings, *more), stopped=stop_to_edit and not edited)


def check_caption(edited_caption: str, **fields: str) -> None:
    """RequestError for what `make_caption` cannot understand, whatever the fields will be laid over."""
    if edited_caption.strip():
        _build(_form(), edited_caption)
    elif not (form := _form(**fields)).empty:
        from ..magi2_core.conditioning.compose import lay_over

        # a caption that comes over a link may bring the subjects that speak
        unknown: dict[str, Any] = {"global_layer": {"alive_subjects_static": [{}] * 99}}
        lay_over(form, unknown)


def _form(**fields: str) -> CaptionForm:
    try:
        from ..magi2_core.conditioning.compose import CaptionForm
    except ImportError as error:
        raise MissingDependencyError(
            f"Captions need the package pydantic: {error}. Install it with: pip install pydantic"
        ) from error
    for name, text in fields.items():
        check_text(text, name)
    return CaptionForm(**fields)


def _build(fields: CaptionForm, start: str) -> dict[str, Any] | str:
    """The caption, or plain text as it came if there is nothing to lay over it."""
    from ..magi2_core.conditioning.compose import CaptionForm, compose_caption, lay_over

    if not start.strip():
        return compose_caption(fields)
    check_text(start, "caption")
    begun = _read(start)
    if fields.empty:
        return start if begun is None else begun
    if begun is None:
        begun = compose_caption(CaptionForm(description=start))
    if "global_layer" not in begun:
        raise RequestError(
            "The fields belong to a text-to-video caption (with a global_layer), and this caption is none; empty the"
            " fields, and edit the caption itself."
        )
    return lay_over(fields, begun)


def _read(text: str) -> dict[str, Any] | None:
    """A caption in JSON, or None for plain text. RequestError for JSON with a mistake in it."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        caption = json.loads(text)
        texts = render_markdown(caption)  # with all that its escapes stand for
    except RecursionError:
        raise RequestError("The caption is nested too deeply; mind the brackets there.") from None
    except ValueError as error:
        raise RequestError(
            f"The caption starts like JSON, but it is none: {error}. Mind commas, quotes and brackets there."
        ) from error
    check_text(texts, "caption, after reading it as JSON,")
    assert isinstance(caption, dict)
    return caption


def _render(caption: dict[str, Any], form: str) -> str:
    from ..magi2_core.conditioning.compose import caption_prompt

    if form == "compact" and "global_layer" not in caption:
        raise RequestError("Only text-to-video captions have a compact form; choose markdown for this one.")
    prompt = caption_prompt(caption, "compact" if form == "compact" else "markdown")
    if not prompt.strip():
        raise RequestError("All fields of the caption are empty; write something into them.")
    return prompt


def _problems(caption: dict[str, Any]) -> list[str]:
    """One warning about fields that the model was not trained with, or that it will miss."""
    from ..magi2_core.conditioning.captions import CAPTIONS, caption_problems

    task = next((task for task, kind in CAPTIONS.items() if set(kind.model_fields) & set(caption)), None)
    if task is None:
        return ["The JSON is no caption that the model knows: it has none of its top-level fields."]
    faults = caption_problems(task, {key: value for key, value in caption.items() if key != "reference_layer"})
    if not faults:
        return []
    more = f"; and {len(faults) - SHOWN_PROBLEMS} more" if len(faults) > SHOWN_PROBLEMS else ""
    return [f"Not as in the captions that the model knows: {'; '.join(faults[:SHOWN_PROBLEMS])}{more}."]


def _left_out(timeline: str) -> list[str]:
    """A warning about a timeline that does not cover the clip, as those do that the model knows (30 §10.1)."""
    segments = read_timeline(timeline)
    if not segments or (segments[0].start, segments[-1].end) == (0, SECONDS):
        return []
    return [
        f"The timeline covers {segments[0].start:g} to {segments[-1].end:g} of the {SECONDS:g} seconds. Numbers at the"
        " start of a line are its time; begin with a word if they are none."
    ]


def _seen(prompt: str, for_picture: bool, model: Model | None) -> tuple[str, int | None, tuple[str, ...]]:
    """The text that the encoder sees, its number of tokens, and what to know about them."""
    if model is None:
        unknown = "Connect model to have the tokens counted."
    else:
        try:
            tokenizer = _tokenizer(model.plan.checkpoint, model.identity)
            prepared = prepare_prompt(prompt, tokenizer, [1] if for_picture else [])
            return prepared.text, prepared.tokens.untruncated, prepared.warnings
        except (CheckpointError, MissingDependencyError) as error:
            unknown = f"The tokens could not be counted. {error}"
    seen = normalise(insert_marker(prompt) if for_picture else prompt)
    if not seen.strip():
        raise RequestError("The caption is empty in its compact form: the encoder reads none of its filled fields.")
    return seen, None, (unknown,)


@lru_cache(maxsize=1)
def _tokenizer(checkpoint: str, identity: object) -> PromptTokenizer:
    """The checkpoint's tokenizer, read once as long as no file there is replaced: `identity` is the model's."""
    return PromptTokenizer(Path(checkpoint) / TEXT_ENCODER)
