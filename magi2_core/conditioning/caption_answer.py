"""Captions from a language model: what is asked for, and how its answer is read (30 §10).

`caption_request` and `read_answer` are the protocol exactly; `find_caption` forgives what chat models add around it.
"""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..files import expand
from .captions import CAPTIONS, Task, response_schema
from .endpoint import DEFAULT_MODEL

MAX_TOKENS = 16384
PROMPT_PLACE = "{user_prompt}"
VARIATION_PLACE = "{variation_seed}"

_MIME = {".png": "image/png", ".webp": "image/webp"}
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class AnswerError(RequestError):
    """An answer that is no caption; the message says why."""


def caption_request(
    task: Task, instruction: str, prompt: str, picture: Any = None, *, model: str = DEFAULT_MODEL, variation: str = ""
) -> dict[str, Any]:
    """The arguments of one chat completions call: one user message, and the strict schema of the caption (30 §10).

    `instruction` is a template with the places for the prompt and the variation, filled in this order. `picture` is an
    address, a path or a PIL image; None for text to video.
    """
    # 30 §10: the prompt first, so that a variation place typed by the user disappears as well
    text = instruction.replace(PROMPT_PLACE, prompt).replace(VARIATION_PLACE, variation)
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        content.append({"type": "image_url", "image_url": {"url": picture_url(picture)}})
    schema = {"name": CAPTIONS[task].__name__, "schema": response_schema(task), "strict": True}
    return {
        "model": model,
        "max_tokens": MAX_TOKENS,
        "messages": [{"role": "user", "content": content}],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def picture_url(picture: Any) -> str:
    """The address of a picture for the endpoint: as it is, or a data URL of the file or of a JPEG (30 §10).

    RequestError for a file that cannot be read.
    """
    if isinstance(picture, str) and picture.startswith(("http://", "https://", "data:")):
        return picture
    if isinstance(picture, str | Path):
        path = expand(picture)
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise RequestError(f"The picture {path} cannot be read: it is not a file.")
        try:
            return _data_url(_MIME.get(path.suffix.lower(), "image/jpeg"), path.read_bytes())
        except OSError as error:
            raise RequestError(f"The picture {path} cannot be read: {error.strerror or error}.") from error
    jpeg = io.BytesIO()
    picture.convert("RGB").save(jpeg, format="JPEG")
    return _data_url("image/jpeg", jpeg.getvalue())


def read_answer(task: Task, text: str | None) -> dict[str, Any]:
    """Parse an answer strictly: a JSON object with the caption's top-level keys, nothing around it (30 §10).

    What lies below the top level is not checked; extra keys stay. AnswerError for anything else.
    """
    try:
        caption = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"the answer is not JSON ({error})") from error
    if not isinstance(caption, dict):
        raise AnswerError(f"the answer is a JSON {type(caption).__name__}, not an object")
    if missing := [key for key in CAPTIONS[task].model_fields if key not in caption]:
        raise AnswerError(f"the answer lacks the top-level key {', '.join(missing)}")
    return caption


def find_caption(task: Task, text: str | None) -> dict[str, Any]:
    """Read an answer strictly, or else find the caption in what surrounds it: code fences, talk, thoughts.

    The last complete object with all top-level keys counts, since drafts come first. AnswerError if there is none.
    """
    try:
        return read_answer(task, text)
    except AnswerError as error:
        reason = str(error)
    for candidate in reversed([*_objects_in(text or ""), *_fenced(text or "")]):
        try:
            return read_answer(task, candidate)
        except AnswerError:
            continue
    raise AnswerError(reason)


def _fenced(text: str) -> list[str]:
    return [block.strip() for block in _FENCE.findall(text)]


def _objects_in(text: str) -> list[str]:
    """Every outermost piece of the text that parses as a JSON object."""
    decoder, found, start = json.JSONDecoder(), [], text.find("{")
    while start >= 0:
        try:
            _, end = decoder.raw_decode(text, start)
            found.append(text[start:end])
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found


def _data_url(mime: str, data: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode('ascii')}"
