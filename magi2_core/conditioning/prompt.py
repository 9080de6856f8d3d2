"""From what the user typed to what the encoder sees: checks, marker, normalisation, tokens (30 §1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import RequestError
from .compact import normalise
from .markers import insert_marker, marker, marker_tokens
from .tokenizer import PromptTokenizer, Tokens

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class PreparedPrompt:
    """The normalised prompt, its tokens, and what the user should know about them."""

    text: str
    tokens: Tokens
    warnings: tuple[str, ...]


def check_text(text: str, what: str = "prompt") -> None:
    """RequestError if the text holds a character that no prompt can have: NUL or half of a surrogate pair."""
    if (at := text.find("\0")) >= 0:
        raise RequestError(f"The {what} holds a NUL character at position {at}; remove it.")
    if found := _SURROGATE.search(text):
        raise RequestError(
            f"The {what} holds half of a surrogate pair (U+{ord(found.group()):04X}) at position {found.start()},"
            " which is no character; retype the symbol there."
        )


def prepare_prompt(prompt: str, tokenizer: PromptTokenizer, figures: Sequence[int] = ()) -> PreparedPrompt:
    """Take a prompt to its tokens (30 §1, steps 2 to 4); this is the text that the encoder really sees.

    `figures` are the numbers of the pictures, none for text alone. With pictures the first-frame sentence is inserted,
    and a picture that the prompt does not name is warned about. RequestError for an unusable text.
    """
    check_text(prompt)
    text = normalise(insert_marker(prompt) if figures else prompt)
    check_text(text, "prompt, after reading it as JSON,")
    tokens = tokenizer(text)
    if not tokens.ids:
        raise RequestError(_why_empty(prompt))
    warnings = _truncation(tokens, "prompt") + [w for figure in figures if (w := _unlinked(text, tokens, figure))]
    if figures and 1 not in figures:
        warnings.append(f"No picture is {marker(1)}, to which the first frame refers; number the pictures from 1.")
    return PreparedPrompt(text, tokens, tuple(warnings))


def prepare_negative(negative: str, tokenizer: PromptTokenizer) -> PreparedPrompt:
    """The same for the negative prompt, which has no marker and may be empty: no text at all (30 §7, 10)."""
    check_text(negative, "negative prompt")
    text = normalise(negative)
    check_text(text, "negative prompt, after reading it as JSON,")
    tokens = tokenizer(text)
    return PreparedPrompt(text, tokens, tuple(_truncation(tokens, "negative prompt")))


def _truncation(tokens: Tokens, what: str) -> list[str]:
    if not tokens.truncated:
        return []
    kept = len(tokens.ids)
    return [f"The {what} has {tokens.untruncated} tokens; only the first {kept} are used, the rest is cut off."]


def _unlinked(text: str, tokens: Tokens, figure: int) -> str | None:
    chosen = marker_tokens(text, tokens, figure)
    if chosen:
        return None
    if chosen is None:
        return (
            f"The prompt does not mention {marker(figure)}, so picture {figure} has no link to the text;"
            f" write {marker(figure)} where the prompt speaks of it."
        )
    return (
        f"{marker(figure)} lies in the part of the prompt that is cut off, so picture {figure} has no link to the"
        " text; shorten the prompt."
    )


def _why_empty(prompt: str) -> str:
    if not prompt:
        return "The prompt is empty; describe the clip in a few words."
    return (
        "The prompt is empty once it is rendered: its JSON has a global_layer, but no text in the fields that the"
        " encoder reads (context, description, subjects, timeline, ...)."
    )
