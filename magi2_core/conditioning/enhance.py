"""A short prompt to a structured caption, by a language model of the user's choice (30 §10).

The request and the reading of a good answer are the protocol of `caption_answer`. Around it: endpoints without strict
schemas are asked in plain words, an answer with faults gets one repair round, results are kept by content, and on
failure the original prompt can be passed on.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import MissingDependencyError, RequestError
from ..events import Events
from .caption_answer import PROMPT_PLACE, VARIATION_PLACE, AnswerError, caption_request, find_caption
from .captions import Task, caption_problems, response_schema
from .endpoint import CONNECTION_LOST, Answer, Endpoint, EndpointError, ask
from .markdown import render_markdown
from .prompt import check_text
from .user_texts import read_text, text_file

logger = logging.getLogger("magi2")

OnFailure = Literal["stop", "original"]
Ask = Callable[[Endpoint, dict[str, Any], Events], Answer]

INSTRUCTION_FILES: dict[Task, str] = {"t2v": "enhance_t2v.md", "i2v": "enhance_i2v.md"}

_SHOWN_PROBLEMS = 20
_KEPT_CAPTIONS = 64
_CUT_OFF = {
    "length": " and was cut off at the token limit",
    CONNECTION_LOST: " and was cut off by a lost connection",
}
_SCHEMA_WORDS = ("response_format", "json_schema", "schema", "grammar", "structured")


@dataclass(frozen=True)
class Enhanced:
    """The outcome: the text to use as prompt, and the caption it was rendered from.

    `caption` is None when the original prompt was passed on; `warnings` then say why.
    """

    prompt: str
    caption: dict[str, Any] | None
    warnings: tuple[str, ...] = ()
    from_cache: bool = False

    @property
    def caption_json(self) -> str:
        """The caption as JSON, for editing; used as a prompt it takes the compact form (30 §1). "" without one."""
        return "" if self.caption is None else json.dumps(self.caption, ensure_ascii=False, indent=2)


def as_it_is(prompt: str, error: Exception, events: Events) -> Enhanced:
    """Pass a prompt on unchanged, and say why."""
    warning = f"The prompt was used as it is, without enhancement. {error}"
    events.log(warning)
    return Enhanced(prompt, None, (warning,))


def instruction(task: Task, user_folder: Path | None = None) -> str:
    """The instruction template of a task, the user's own if there is one; it must have a place for the prompt."""
    name = INSTRUCTION_FILES[task]
    text = read_text(name, user_folder)
    if PROMPT_PLACE not in text:
        file = text_file(name, user_folder)
        raise RequestError(f"The instruction text {file} must hold {PROMPT_PLACE} where the user's prompt belongs.")
    return text


class Enhancer:
    """Makes captions through one endpoint and keeps them by content.

    `texts_folder` holds the user's own instruction texts, `cache_folder` captions that outlive the process.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        texts_folder: Path | None = None,
        cache_folder: Path | None = None,
        ask: Ask = ask,
    ) -> None:
        self.endpoint = endpoint
        self._texts_folder = texts_folder
        self._cache = _CaptionCache(cache_folder)
        self._ask = ask
        self._strict = True

    def enhance(
        self, prompt: str, picture: Any, events: Events, *, on_failure: OnFailure = "stop", variation: str = ""
    ) -> Enhanced:
        """Turn a prompt, and a picture if there is one, into a caption rendered as Markdown (30 §9, 10).

        `picture` is a path, an address, a PIL image or None. With `on_failure="original"` a failure gives the prompt
        back unchanged with a warning; otherwise it raises RequestError. Cancelling always passes through. Another
        `variation` text asks for another caption.
        """
        check_text(prompt)
        if not prompt.strip():
            raise RequestError("There is no prompt to enhance; describe the clip in a few words.")
        task: Task = "t2v" if picture is None else "i2v"
        try:
            template = instruction(task, self._texts_folder)
            wish = f"This is variation {variation}: choose other details than in the others." if variation else ""
            if wish and VARIATION_PLACE not in template:  # the user's own instruction need not have one
                template = f"{template}\n\n{VARIATION_PLACE}"
            model = self.endpoint.model
            request = caption_request(task, template, prompt, picture, model=model, variation=wish)
            return self._enhance(task, request, events)
        except (RequestError, MissingDependencyError) as error:
            if on_failure == "stop":
                raise
            return as_it_is(prompt, error, events)

    def _enhance(self, task: Task, request: dict[str, Any], events: Events) -> Enhanced:
        key = self._cache_key(request)
        if (kept := self._cache.get(key)) is not None:
            return Enhanced(render_markdown(kept), kept, from_cache=True)
        sent = "the prompt and the picture" if task == "i2v" else "the prompt"
        events.log(f"Sending {sent} to {self.endpoint.model} at {self.endpoint.host}.")
        caption, problems = self._converse(task, request, events)
        if not problems:
            self._cache.put(key, caption)
            return Enhanced(render_markdown(caption), caption)
        warning = f"The caption does not fit its schema and is used all the same: {'; '.join(problems)}"
        events.log(warning)
        return Enhanced(render_markdown(caption), caption, (warning,))

    def _converse(self, task: Task, request: dict[str, Any], events: Events) -> tuple[dict[str, Any], list[str]]:
        """Ask, and once more with the faults if there are any; the caption and the faults that it still has."""
        answer = self._first_answer(task, request, events)
        caption, problems = _judge(task, answer)
        if caption is not None and not problems:
            return caption, []
        events.log(f"The caption has {len(problems)} faults; asking once more. First: {problems[0]}")
        try:
            repair = self._send(task, _repair_request(request, answer, problems), events)
        except EndpointError as error:
            if caption is None:
                raise
            return caption, [*problems, str(error)]
        repaired, remaining = _judge(task, repair)
        if repaired is not None:
            return repaired, remaining
        if caption is not None:  # usable as it was: only its inner fields have faults
            return caption, problems
        raise RequestError(
            f"The model {self.endpoint.model!r} made no usable caption, also when asked again: {remaining[0]}."
        )

    def _first_answer(self, task: Task, request: dict[str, Any], events: Events) -> Answer:
        if self._strict:
            try:
                return self._send(task, request, events)
            except EndpointError as error:
                if not _refuses_schema(error):
                    raise
            events.log("The endpoint does not take a strict schema; asking in plain words.")
        answer = self._ask(self.endpoint, _plain_request(task, request), events)
        self._strict = False  # not before an answer: a wrong model name is refused in the same way
        return answer

    def _send(self, task: Task, request: dict[str, Any], events: Events) -> Answer:
        return self._ask(self.endpoint, request if self._strict else _plain_request(task, request), events)

    def _cache_key(self, request: dict[str, Any]) -> str:
        content = json.dumps([self.endpoint.base_url, request], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


class _CaptionCache:
    """The last captions by the content of their request; also as files, if there is a folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._captions: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def get(self, key: str) -> dict[str, Any] | None:
        if key in self._captions:
            self._captions.move_to_end(key)
            return copy.deepcopy(self._captions[key])
        if self._folder is not None:
            try:
                kept = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return None
            return kept if isinstance(kept, dict) else None
        return None

    def put(self, key: str, caption: dict[str, Any]) -> None:
        self._captions[key] = copy.deepcopy(caption)
        while len(self._captions) > _KEPT_CAPTIONS:
            self._captions.popitem(last=False)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / f"{key}.json").write_text(json.dumps(caption), encoding="utf-8")
            except OSError as error:
                logger.warning("The caption could not be kept in %s: %s", self._folder, error)


def _judge(task: Task, answer: Answer) -> tuple[dict[str, Any] | None, list[str]]:
    """The caption in an answer, None if there is none to use, and its faults."""
    try:
        caption = find_caption(task, answer.text)
    except AnswerError as error:
        return None, [f"{error}{_CUT_OFF.get(answer.finish_reason or '', '')}"]
    try:
        shown = render_markdown(caption)
        check_text(shown, "caption")
    except RecursionError:
        return None, ["the caption is nested too deeply"]
    except RequestError as error:
        return None, [str(error)]
    if not shown:
        return None, ["all fields of the caption are empty"]
    return caption, caption_problems(task, caption)[:_SHOWN_PROBLEMS]


def _refuses_schema(error: EndpointError) -> bool:
    return error.status in (400, 422) or (
        error.status is not None and error.status >= 500 and any(word in str(error).lower() for word in _SCHEMA_WORDS)
    )


def _plain_request(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    """The same request without `response_format`: the schema is part of the first message's text instead."""
    plain = copy.deepcopy({key: value for key, value in request.items() if key != "response_format"})
    schema = json.dumps(response_schema(task), ensure_ascii=False)
    part = plain["messages"][0]["content"][0]
    part["text"] += f"\n\nAnswer with one JSON object that fits this JSON schema, and with nothing else:\n{schema}"
    return plain


def _repair_request(request: dict[str, Any], answer: Answer, problems: list[str]) -> dict[str, Any]:
    faults = "\n".join(f"- {problem}" for problem in problems)
    asked = f"Your answer cannot be used yet:\n{faults}\nAnswer again with the complete, corrected JSON object only."
    if answer.finish_reason == "length":
        asked += " Keep every text shorter than before."
    history = [
        *request["messages"],
        {"role": "assistant", "content": answer.text or "(no answer)"},
        {"role": "user", "content": asked},
    ]
    return {**request, "messages": history}
