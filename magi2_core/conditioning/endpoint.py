"""An OpenAI-compatible endpoint for captions: where it is, its key, and one cancellable call (30 §10).

The key comes from the environment or from a file of the user, and appears in no message, log line or traceback: every
failure becomes a sentence here, from which the key is taken out, and the library's own exceptions go no further.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ..errors import MissingDependencyError, RequestError
from ..events import Events
from ..files import parse_json

DEFAULT_MODEL = "gemini-3.1-pro-preview"
DEFAULT_BASE_URL = "https://generativelanguage.googleapis.com/v1beta/openai/"
SETTINGS_FILE = "magi2_enhance.json"
VARIABLES = {
    "api_key": "MAGI2_ENHANCE_API_KEY",
    "base_url": "MAGI2_ENHANCE_BASE_URL",
    "model": "MAGI2_ENHANCE_MODEL",
    "timeout": "MAGI2_ENHANCE_TIMEOUT",
}
STAGE = "enhance_prompt"
CONNECTION_LOST = "connection lost"

_RETRIES = 2  # the library's own default: connection errors, 408, 409, 429 and 5xx, with back-off (30 §10)
_LIMIT_IN_TIMEOUTS = 5  # an answer that keeps trickling in is given up after this many times the time-out
_POLL_SECONDS = 0.1
_LONGEST_ANSWER = 1_000_000
# By name, since older versions of the client let the transport's own errors through.
_LOST_CONNECTION = ("APIConnectionError", "RemoteProtocolError", "ReadError")
_USUAL_ANSWER = 8000  # characters of a caption, for the progress bar


class EndpointError(RequestError):
    """A call that brought no answer; `status` is the HTTP status, None if there was none."""

    def __init__(self, sentence: str, status: int | None = None) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Endpoint:
    """Where captions are made. `timeout` is how many seconds may pass without a byte of the answer."""

    base_url: str = DEFAULT_BASE_URL
    model: str = DEFAULT_MODEL
    key: str = field(default="", repr=False)
    timeout: float = 180.0

    def __post_init__(self) -> None:
        try:
            address = urlsplit(self.base_url)
            usable = address.scheme in ("http", "https") and address.hostname and address.port != 0
        except ValueError:  # an unfinished IPv6 address, a port that is none
            usable = False
        if not usable:
            raise RequestError(
                "The enhancement address must start with http:// or https:// and name a host, and a port from 1 to"
                f" 65535 if it has one, like {DEFAULT_BASE_URL}; set {VARIABLES['base_url']}."
            )
        if address.username or address.password or address.query:
            # the transport logs every address that it calls
            raise RequestError(
                "The enhancement address holds a user name, a password or a query, which would end up in logs; write"
                f" the key into {VARIABLES['api_key']} and leave it out of {VARIABLES['base_url']}."
            )
        if not self.key.isascii() or not self.key.isprintable() or " " in self.key:
            raise RequestError(
                f"The enhancement key holds a space or another character that no key has; set {VARIABLES['api_key']}"
                " again."
            )
        if not 0 < self.timeout < math.inf:
            raise RequestError(f"The enhancement time-out is {self.timeout} seconds; it must be above 0.")

    @property
    def host(self) -> str:
        """Host and port, for messages."""
        address = urlsplit(self.base_url)
        return f"{address.hostname}:{address.port}" if address.port else str(address.hostname)

    def scrub(self, text: str) -> str:
        """Take the key out of a text."""
        for form in {self.key, quote(self.key, safe=""), json.dumps(self.key)[1:-1]}:
            if len(form) >= 4:
                text = text.replace(form, "[hidden]")
        return text


@dataclass(frozen=True)
class Answer:
    """The text of the first choice, and why it ended: "length" if it was cut off, or CONNECTION_LOST."""

    text: str
    finish_reason: str | None


def find_endpoint(settings_folder: Path | None = None, environment: Mapping[str, str] | None = None) -> Endpoint | None:
    """The endpoint that the user configured, None without an address: no key is sent to a server that nobody named.

    Values come from the variables MAGI2_ENHANCE_API_KEY, _BASE_URL, _MODEL and _TIMEOUT, then from the JSON file
    `magi2_enhance.json` in `settings_folder` (keys api_key, base_url, model, timeout). A local server needs no key.
    RequestError for values that cannot be used.
    """
    environment = os.environ if environment is None else environment
    values = _read_settings(settings_folder / SETTINGS_FILE) if settings_folder is not None else {}
    for name, variable in VARIABLES.items():
        if environment.get(variable, "").strip():
            values[name] = environment[variable].strip()
    if not values.get("base_url"):
        return None
    try:
        timeout = float(values.get("timeout") or Endpoint.timeout)
    except ValueError:
        raise RequestError(f"The enhancement time-out {values['timeout']!r} is not a number of seconds.") from None
    return Endpoint(
        base_url=values["base_url"],
        model=values.get("model") or DEFAULT_MODEL,
        key=values.get("api_key", ""),
        timeout=timeout,
    )


def _read_settings(file: Path) -> dict[str, str]:
    if not file.is_file():
        return {}
    try:
        content = parse_json(file.read_bytes())
    except (OSError, ValueError):  # the text may be shown nowhere: it holds the key
        content = None
    if not isinstance(content, dict):
        raise RequestError(
            f'The settings file {file} is not a JSON object like {{"api_key": "...", "base_url": "...", "model":'
            ' "..."}.'
        )
    return {name: str(content[name]).strip() for name in VARIABLES if content.get(name) is not None}


def ask(endpoint: Endpoint, request: dict[str, Any], events: Events) -> Answer:
    """Send one chat completions request and wait for its answer; EndpointError with a sentence if none comes.

    The call runs in a thread of its own, so that `events.check` is asked ten times a second and stops it at once. The
    answer is streamed where the endpoint can: a slow model then does not run into the time-out.
    """
    received = [0]
    call = _Call(lambda: _converse(endpoint, request, received))
    try:
        while not wait([call.result], timeout=_POLL_SECONDS).done:
            events.check()
            events.progress(STAGE, min(received[0], _USUAL_ANSWER - 1), _USUAL_ANSWER)
        outcome = call.result.result()
    except BaseException:
        call.stop()
        raise
    if isinstance(outcome, _Failure):
        raise EndpointError(endpoint.scrub(outcome.sentence), outcome.status)
    events.progress(STAGE, _USUAL_ANSWER, _USUAL_ANSWER)
    return Answer(endpoint.scrub(outcome.text), outcome.finish_reason)


@dataclass(frozen=True)
class _Failure:
    """What went wrong, as plain data: no exception that holds the request leaves the thread."""

    sentence: str
    status: int | None = None


class _Call:
    """A coroutine in a thread with its own event loop: the caller may have a running one already."""

    def __init__(self, work: Callable[[], Awaitable[Answer | _Failure]]) -> None:
        self.result: Future[Answer | _Failure] = Future()
        self._work = work
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="magi2-enhance", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Cancel the coroutine, which closes its connection, and wait for the thread."""
        self._started.wait()
        if not self.result.done():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        try:
            self.result.set_result(asyncio.run(self._main()))
        except asyncio.CancelledError:
            self.result.cancel()
        except BaseException as error:
            self._started.set()
            self.result.set_exception(error)

    async def _main(self) -> Answer | _Failure:
        self._loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._task = task
        self._started.set()
        return await self._work()


async def _converse(endpoint: Endpoint, request: dict[str, Any], received: list[int]) -> Answer | _Failure:
    try:
        import openai
    except ImportError as error:
        raise MissingDependencyError(
            f"Enhancing prompts needs the package openai ({error}). Install it with: pip install openai"
        ) from error
    limit = endpoint.timeout * _LIMIT_IN_TIMEOUTS
    try:
        async with (
            asyncio.timeout(limit),
            openai.AsyncOpenAI(
                api_key=endpoint.key or "not-needed",
                base_url=endpoint.base_url,
                timeout=endpoint.timeout,
                max_retries=_RETRIES,
            ) as client,
        ):
            response = await client.chat.completions.with_raw_response.create(**request, stream=True)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                return await _read_stream(response.parse(), received)
            return _read_whole(await response.http_response.aread())
    except openai.APIStatusError as error:
        return _Failure(_status_sentence(endpoint, error.status_code, str(error.message)), error.status_code)
    except (openai.APITimeoutError, TimeoutError):
        return _Failure(
            f"The caption endpoint {endpoint.host} gave no complete answer in time (time-out {endpoint.timeout:g} s"
            f" without data, {limit:g} s in all); set {VARIABLES['timeout']} higher or use a faster model."
        )
    except openai.APIConnectionError as error:
        return _Failure(
            f"The caption endpoint {endpoint.host} cannot be reached: {error.__cause__ or error}. Check the address"
            f" ({VARIABLES['base_url']}) and that the server runs."
        )
    except Exception as error:
        return _Failure(f"The answer of the caption endpoint {endpoint.host} broke off: {_short(str(error))}")


async def _read_stream(stream: Any, received: list[int]) -> Answer | _Failure:
    """Collect a streamed answer; what came before a lost connection counts as an answer that was cut off."""
    parts: list[str] = []
    finish = None
    try:
        async with stream:
            async for chunk in stream:
                if not chunk.choices:
                    continue
                choice = chunk.choices[0]
                parts.append((choice.delta.content if choice.delta else None) or "")
                received[0] += len(parts[-1])
                finish = choice.finish_reason or finish
                if received[0] > _LONGEST_ANSWER:
                    return _Failure(f"The answer is longer than {_LONGEST_ANSWER} characters; no caption is.")
    except Exception as error:
        if type(error).__name__ not in _LOST_CONNECTION:
            raise
        finish = CONNECTION_LOST
    return Answer("".join(parts), finish)


def _read_whole(body: bytes) -> Answer | _Failure:
    """Read an answer from an endpoint that does not stream."""
    try:
        choice = json.loads(body)["choices"][0]
        text = choice["message"].get("content") or ""
        if not isinstance(text, str):
            text = "".join(part.get("text", "") for part in text)
        return Answer(text, choice.get("finish_reason"))
    except (ValueError, LookupError, TypeError, AttributeError):
        return _Failure("The caption endpoint answered with something else than a chat completion.")


def _status_sentence(endpoint: Endpoint, status: int, message: str) -> str:
    said = f"It said: {_short(message)}"
    where = f"The caption endpoint {endpoint.host}"
    if status in (401, 403):
        return f"{where} refused the key ({status}); check {VARIABLES['api_key']}. {said}"
    if status == 404:
        return f"{where} knows no chat model {endpoint.model!r} at this address ({status}). {said}"
    if status == 429:
        return f"{where} is limiting requests ({status}), also after {_RETRIES} more tries; wait or change it. {said}"
    if status >= 500:
        return f"{where} failed ({status}), also after {_RETRIES} more tries. {said}"
    return f"{where} refused the request ({status}). {said}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 300 else text[:300] + "..."
