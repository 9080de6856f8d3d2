"""Pictures in the prompt: the `<Figure N>` marker, its insertion, and the features pooled from it (30 §5)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import RequestError
from .tokenizer import Tokens

REFERENCE_SENTENCE = "The first frame refers to <Figure 1>"


def marker(figure: int) -> str:
    """The literal text that names picture number `figure` in a prompt."""
    return f"<Figure {figure}>"


def insert_marker(prompt: str) -> str:
    """Add the sentence that ties the first frame to picture 1, as the model was used with pictures (30 §5).

    A JSON object gets it as its `reference_layer`; every other prompt has it glued to its end, without a separator
    and even if it names the picture already.
    """
    try:
        caption = json.loads(prompt)
        if isinstance(caption, dict):
            return json.dumps({**caption, "reference_layer": [REFERENCE_SENTENCE]}, ensure_ascii=False)
    except (ValueError, RecursionError):
        pass
    return f"{prompt}reference_layer:{REFERENCE_SENTENCE}"


def parse_pictures(argument: str | None) -> dict[str, str]:
    """Turn an image argument into a map from marker to path, in source order (30 §5).

    None or a blank text is no picture; a text that starts with `{` is a JSON object from marker to path; another one is
    the path of picture 1. RequestError for broken JSON.
    """
    text = (argument or "").strip()
    if not text:
        return {}
    if not text.startswith("{"):
        return {marker(1): text}
    try:
        return {key: str(path) for key, path in json.loads(text).items()}
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"The list of pictures is not valid JSON ({error}); write it like"
            ' {"<Figure 1>": "first.png", "<Figure 2>": "second.png"}.'
        ) from error


def figure_number(key: str) -> int:
    """The first run of digits in a marker, 1 if there is none (30 §5). RequestError for a number beyond all use."""
    digits = re.search(r"\d+", key)
    if digits and len(digits.group()) > 9:
        raise RequestError(f"{key[:40]} is no name of a picture; write <Figure 1>, <Figure 2> and so on.")
    return int(digits.group()) if digits else 1


def picture_order(keys: Iterable[str], *, numeric: bool = False) -> list[str]:
    """The order in which pictures enter the sequence.

    String order as in the reference, where `<Figure 10>` comes before `<Figure 1>` (30 §5); by number if `numeric`.
    """
    return sorted(keys, key=lambda key: (figure_number(key), key)) if numeric else sorted(keys)


def check_equal_sizes(sizes: Mapping[str, tuple[int, int]]) -> None:
    """RequestError unless all pictures have the same (width, height): their latents are stacked (30 §5)."""
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key} {width}x{height}" for key, (width, height) in sizes.items())
        raise RequestError(f"The reference pictures have different sizes ({listed}); scale or crop them to one size.")


def marker_tokens(text: str, tokens: Tokens, figure: int) -> list[int] | None:
    """Positions of the tokens that touch the marker's first occurrence in `text`.

    None if the text does not hold the marker, [] if truncation removed it (30 §5).
    """
    target = marker(figure)
    start = text.find(target)
    if start < 0:
        return None
    end = start + len(target)
    return [
        i for i, (a, b) in enumerate(tokens.offsets) if max(a, start) < min(b, end) and ((a, b) != (0, 0) or i == 0)
    ]


def pool_markers(features_LD: Tensor, text: str, tokens: Tokens, figures: Sequence[int]) -> Tensor:
    """One vector for each picture: the mean of its marker's features, zero without a marker (30 §5).

    features_LD [L, D] of the normalised prompt `text`; returns [len(figures), D] in the same dtype.
    """
    pooled_MD = features_LD.new_zeros(len(figures), features_LD.shape[1])
    for row, figure in enumerate(figures):
        if chosen := marker_tokens(text, tokens, figure):
            # 30 §5: summed in float32, rounded once
            pooled_MD[row] = features_LD[torch.tensor(chosen)].float().mean(0).to(features_LD.dtype)
    return pooled_MD
