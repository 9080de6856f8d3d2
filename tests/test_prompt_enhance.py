"""Enhancement against a real server on this machine; the key must show up nowhere (30 §10)."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from magi2_native.magi2_core.conditioning.captions import CAPTIONS, Task
from magi2_native.magi2_core.conditioning.endpoint import Endpoint, find_endpoint
from magi2_native.magi2_core.conditioning.enhance import Enhanced, Enhancer
from magi2_native.magi2_core.conditioning.markdown import render_markdown
from magi2_native.magi2_core.errors import MissingDependencyError, RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.caption_server import (
    CaptionServer,
    Step,
    calls_ended,
    endless,
    refused,
    silent,
    streamed,
    whole,
)
from PIL import Image
from torch import Tensor

# With signs that are spelled differently in addresses, JSON and Python.
KEY = 'sk-Secret/Key+9=%41"x'
EXAMPLES = Path(__file__).parents[1] / "workflows" / "captions"


def example(task: Task) -> dict[str, Any]:
    files = sorted(EXAMPLES.glob("*.json"))
    captions = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return next(caption for caption in captions if set(caption) == set(CAPTIONS[task].model_fields))


T2V, I2V = example("t2v"), example("i2v")
GOOD = json.dumps(T2V, ensure_ascii=False)


class Watcher(Silent):
    """Events that remember everything, and can cancel."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reports: list[tuple[str, int, int]] = []
        self.cancel_when: Callable[[], object] = lambda: False
        self.cancelled_at = 0.0

    def log(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self.reports.append((stage, done, total))

    def check(self) -> None:
        if self.cancel_when():
            self.cancelled_at = time.monotonic()
            raise CancelledError


class CancelledError(Exception):
    pass


@pytest.fixture
def events() -> Watcher:
    return Watcher()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture(autouse=True)
def the_key_shows_up_nowhere(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], events: Watcher
) -> Iterator[None]:
    """Every log line of every library, everything printed, and everything told to the user, is searched."""
    caplog.set_level(logging.DEBUG)
    for name in ("openai", "httpx", "httpx2", "httpcore", "httpcore2", "magi2", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)
    yield
    printed = capfd.readouterr()
    seen = [caplog.text, printed.out, printed.err, *events.lines]
    assert not any(spelling in text for text in seen for spelling in spellings())


def spellings() -> list[str]:
    from urllib.parse import quote

    return [KEY, quote(KEY, safe=""), json.dumps(KEY)[1:-1], repr(KEY)[1:-1], base64.b64encode(KEY.encode()).decode()]


def failure(enhancer: Enhancer, events: Watcher, prompt: str = "a boat", picture: Any = None) -> str:
    """The sentence of a failing enhancement, once nothing that hangs on the error has been found to hold the key."""
    with pytest.raises(RequestError) as caught:
        enhancer.enhance(prompt, picture, events)
    error: BaseException | None = caught.value
    told = "".join(traceback.format_exception(caught.value))
    while error is not None:
        told += repr(error) + repr(vars(error))
        error = error.__cause__ or error.__context__
    assert not any(spelling in told for spelling in spellings())
    return str(caught.value)


def enhancer_for(server: CaptionServer, **options: Any) -> Enhancer:
    endpoint = Endpoint(base_url=server.url, model="m", key=KEY, timeout=options.pop("timeout", 20.0))
    return Enhancer(endpoint, **options)


def answer_of(*steps: Step, events: Watcher, **options: Any) -> tuple[Enhanced, CaptionServer]:
    with CaptionServer(*steps) as server:
        return enhancer_for(server, **options).enhance("a boat", None, events), server


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [streamed(GOOD), whole(GOOD)], ids=["streamed", "in one piece"])
def test_a_good_answer_becomes_the_prompt(step: Step, events: Watcher) -> None:
    result, server = answer_of(step, events=events)
    assert result.prompt == render_markdown(T2V)
    assert result.caption == T2V
    assert result.warnings == ()
    assert json.loads(result.caption_json) == T2V
    assert len(server.requests) == 1
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert server.paths == ["/v1/chat/completions"]
    assert events.reports[-1] == ("enhance_prompt", 8000, 8000)


def test_the_user_is_told_what_is_sent_where(events: Watcher) -> None:
    _, server = answer_of(streamed(GOOD), events=events)
    assert events.lines == [f"Sending the prompt to m at 127.0.0.1:{server.server_address[1]}."]


def test_the_request_has_the_protocols_parameters(events: Watcher) -> None:
    _, server = answer_of(streamed(GOOD), events=events)
    (request,) = server.requests
    assert set(request) == {"model", "max_tokens", "messages", "response_format", "stream"}
    assert request["max_tokens"] == 16384
    assert request["response_format"]["json_schema"]["strict"] is True
    assert "a boat" in request["messages"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n{GOOD}\n```",
        f"Here is the caption:\n\n{GOOD}\n\nEnjoy!",
        f'<think>Maybe {{"global_layer": 1, "dynamic_layer": 2}}?</think>\n```\n{GOOD}\n```',
        f"\ufeff{GOOD}",
    ],
    ids=["fenced", "surrounded", "thoughts first", "byte order mark"],
)
def test_a_caption_is_found_in_what_surrounds_it(text: str, events: Watcher) -> None:
    result, server = answer_of(streamed(text), events=events)
    assert result.caption == T2V
    assert len(server.requests) == 1


def test_a_picture_is_sent_and_asks_for_the_other_caption(tmp_path: Path, events: Watcher) -> None:
    file = tmp_path / "start.PNG"
    Image.new("RGB", (8, 6), (10, 200, 30)).save(file)
    with CaptionServer(streamed(json.dumps(I2V))) as server:
        result = enhancer_for(server).enhance("it moves", file, events)
    assert result.prompt == render_markdown(I2V)
    (request,) = server.requests
    assert request["response_format"]["json_schema"]["name"] == "I2VEnhanceResult"
    url = request["messages"][0]["content"][1]["image_url"]["url"]
    assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == file.read_bytes()
    assert "the prompt and the picture" in events.lines[0]


def test_a_picture_that_cannot_be_read_gets_a_sentence(tmp_path: Path, events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server:
        sentence = failure(enhancer_for(server), events, picture=tmp_path / "none.png")
        os.mkfifo(tmp_path / "pipe.png")
        pipe = failure(enhancer_for(server), events, picture=tmp_path / "pipe.png")
    assert "none.png cannot be read: No such file" in sentence
    assert "pipe.png cannot be read: it is not a file" in pipe
    assert server.requests == []


# --- answers with faults: one repair round ---------------------------------------------------------------------------


def without(caption: dict[str, Any], *path: str) -> str:
    copy = json.loads(json.dumps(caption))
    part = copy
    for key in path[:-1]:
        part = part[key]
    del part[path[-1]]
    return json.dumps(copy)


@pytest.mark.parametrize(
    ("text", "reason", "fault"),
    [
        ("Sure! Here is", "stop", "not JSON"),
        (GOOD[: len(GOOD) // 2], "length", "cut off at the token limit"),
        ("[]", "stop", "a JSON list, not an object"),
        ("", "stop", "not JSON"),
        (without(T2V, "dynamic_layer"), "stop", "lacks the top-level key dynamic_layer"),
        (without(T2V, "global_layer", "aesthetics", "style"), "stop", "global_layer.aesthetics.style: Field required"),
        ('{"global_layer": {}, "dynamic_layer": null}', "stop", "all fields of the caption are empty"),
        ('{"global_layer": ' + "[" * 800 + "1" + "]" * 800 + ', "dynamic_layer": 1}', "stop", ""),
        ('{"global_layer": {"context": "\\ud83d"}, "dynamic_layer": {}}', "stop", "half of a surrogate pair"),
    ],
    ids=["talk", "truncated", "list", "empty", "top-level key", "inner field", "all empty", "too deep", "surrogate"],
)
def test_a_faulty_answer_is_asked_for_once_more(text: str, reason: str, fault: str, events: Watcher) -> None:
    result, server = answer_of(streamed(text, reason=reason), streamed(GOOD), events=events)
    assert result.caption == T2V
    first, second = server.requests
    assert second["messages"][:1] == first["messages"]
    assert second["messages"][1] == {"role": "assistant", "content": text or "(no answer)"}
    assert fault in second["messages"][2]["content"]
    assert ("shorter" in second["messages"][2]["content"]) == (reason == "length")
    assert second["response_format"] == first["response_format"]


def test_a_connection_that_is_lost_in_the_middle_is_an_answer_cut_off(events: Watcher) -> None:
    half = streamed(GOOD[: len(GOOD) // 2], finish=False)
    result, server = answer_of(half, streamed(GOOD), events=events)
    assert result.caption == T2V
    assert "cut off by a lost connection" in server.requests[1]["messages"][2]["content"]
    with CaptionServer(half) as server:
        assert "made no usable caption" in failure(enhancer_for(server), events)


def test_an_error_inside_a_stream_gets_a_sentence(events: Watcher) -> None:
    error = [{"error": {"message": f"out of memory, key {KEY}"}}]
    with CaptionServer(lambda handler: handler.send_events(error)) as server:
        assert "broke off: out of memory, key [hidden]" in failure(enhancer_for(server), events)


def test_two_useless_answers_get_a_sentence(events: Watcher) -> None:
    with CaptionServer(streamed("no"), streamed("still no")) as server:
        sentence = failure(enhancer_for(server), events)
    assert "made no usable caption, also when asked again: the answer is not JSON" in sentence
    assert len(server.requests) == 2


def test_faults_below_the_top_level_are_accepted_after_the_repair_with_a_warning(events: Watcher) -> None:
    faulty = without(T2V, "global_layer", "aesthetics", "style")
    result, server = answer_of(streamed(faulty), events=events)
    assert len(server.requests) == 2
    assert result.prompt == render_markdown(json.loads(faulty))
    (warning,) = result.warnings
    assert "global_layer.aesthetics.style" in warning


def test_a_usable_first_answer_survives_a_useless_repair(events: Watcher) -> None:
    faulty = without(T2V, "global_layer", "aesthetics", "style")
    result, _ = answer_of(streamed(faulty), streamed("sorry"), events=events)
    assert result.caption == json.loads(faulty)
    result, _ = answer_of(streamed(faulty), refused(403, "quota"), events=events)
    assert result.caption == json.loads(faulty)
    assert "quota" in result.warnings[0]


# --- endpoints without strict schemas --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "message"), [(400, "unknown field response_format"), (422, "no"), (500, "grammar failed")]
)
def test_an_endpoint_without_schemas_is_asked_in_plain_words(status: int, message: str, events: Watcher) -> None:
    tries = 3 if status == 500 else 1
    steps = [refused(status, message)] * tries
    with CaptionServer(*steps, streamed(f"```\n{GOOD}\n```"), streamed(GOOD)) as server:
        enhancer = enhancer_for(server)
        assert enhancer.enhance("a boat", None, events).caption == T2V
        assert len(server.requests) == tries + 1
        plain = server.requests[-1]
        assert "response_format" not in plain
        assert '"additionalProperties": false' in plain["messages"][0]["content"][0]["text"]
        assert [message["role"] for message in plain["messages"]] == ["user"]
        enhancer.enhance("another boat", None, events)
        assert "response_format" not in server.requests[-1]
        assert len(server.requests) == tries + 2


def test_a_strict_schema_is_asked_for_again_after_a_refusal_that_had_another_cause(events: Watcher) -> None:
    steps = [refused(400, "model not found")] * 2
    with CaptionServer(*steps, streamed(GOOD)) as server:
        enhancer = enhancer_for(server)
        failure(enhancer, events)
        enhancer.enhance("a boat", None, events)
        assert "response_format" in server.requests[-1]


def test_a_request_that_is_refused_in_plain_words_too_gets_a_sentence(events: Watcher) -> None:
    with CaptionServer(refused(400, "the prompt is not allowed")) as server:
        sentence = failure(enhancer_for(server), events)
    assert "refused the request (400). It said:" in sentence
    assert "the prompt is not allowed" in sentence
    assert len(server.requests) == 2


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_refused_key_is_not_repeated_although_the_server_echoes_it(events: Watcher) -> None:
    with CaptionServer(refused(401, f"Incorrect API key provided: {KEY}. Header: Bearer {KEY}")) as server:
        sentence = failure(enhancer_for(server), events)
    assert "refused the key (401); check MAGI2_ENHANCE_API_KEY" in sentence
    assert "Incorrect API key provided: [hidden]" in sentence
    assert len(server.requests) == 1


def test_a_key_echoed_in_a_caption_is_taken_out(events: Watcher) -> None:
    leaky = json.loads(GOOD)
    leaky["global_layer"]["context"] = f"the key is {KEY}"
    result, _ = answer_of(streamed(json.dumps(leaky)), events=events)
    assert KEY not in result.prompt
    assert "the key is [hidden]" in result.prompt


def test_too_many_requests_are_retried(events: Watcher) -> None:
    result, server = answer_of(refused(429, "slow down"), refused(429, "slow down"), streamed(GOOD), events=events)
    assert result.caption == T2V
    assert len(server.requests) == 3


@pytest.mark.parametrize(("status", "sentence"), [(429, "is limiting requests (429)"), (500, "failed (500)")])
def test_lasting_failures_get_a_sentence_after_the_retries(status: int, sentence: str, events: Watcher) -> None:
    with CaptionServer(refused(status, "come back later")) as server:
        said = failure(enhancer_for(server), events)
    assert sentence in said
    assert "after 2 more tries" in said
    assert "come back later" in said
    assert len(server.requests) == 3


def test_a_server_that_failed_once_is_retried(events: Watcher) -> None:
    result, _ = answer_of(refused(500, "oops"), streamed(GOOD), events=events)
    assert result.caption == T2V


def test_an_unknown_model_gets_a_sentence(events: Watcher) -> None:
    with CaptionServer(refused(404, "no such model")) as server:
        assert "knows no chat model 'm' at this address (404)" in failure(enhancer_for(server), events)


def test_a_silent_server_runs_into_the_time_out(events: Watcher) -> None:
    with CaptionServer(silent) as server:
        sentence = failure(enhancer_for(server, timeout=0.2), events)
    assert "gave no complete answer in time (time-out 0.2 s" in sentence


def test_a_slow_stream_is_no_time_out_as_long_as_data_come(events: Watcher) -> None:
    """The answer takes longer than the time-out, and each wait for a part of it is far below it."""
    started = time.monotonic()
    result, _ = answer_of(streamed(GOOD, pause=0.35), events=events, timeout=2.0)
    assert result.caption == T2V
    assert time.monotonic() - started > 2.0
    growing = [done for _, done, _ in events.reports]
    assert growing == sorted(growing)
    assert len(set(growing)) > 2


def test_a_stream_without_end_is_given_up(events: Watcher) -> None:
    with CaptionServer(endless({"choices": []})) as server:
        assert "1 s in all" in failure(enhancer_for(server, timeout=0.2), events)
        assert server.hung_up.wait(10)


def test_a_server_that_is_not_there_gets_a_sentence(events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server:
        enhancer = enhancer_for(server)
    sentence = failure(enhancer, events)
    assert "cannot be reached" in sentence
    assert "MAGI2_ENHANCE_BASE_URL" in sentence


def test_an_answer_of_another_kind_gets_a_sentence(events: Watcher) -> None:
    with CaptionServer(lambda handler: handler.send(200, {"hello": 1})) as server:
        assert "something else than a chat completion" in failure(enhancer_for(server), events)


@pytest.mark.parametrize("address", ["http://user:hunter22@host/v1", "http://hunter22@host/v1", "http://host?key=hunter22"])
def test_an_address_with_a_secret_in_it_is_refused_because_addresses_are_logged(address: str) -> None:
    with pytest.raises(RequestError, match="write the key into MAGI2_ENHANCE_API_KEY") as caught:
        Endpoint(base_url=address, key=KEY)
    assert "hunter22" not in str(caught.value)


# --- cancel, pass-through, cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["stop", "original"])
def test_cancel_stops_a_waiting_request_at_once(on_failure: Any, events: Watcher) -> None:
    with CaptionServer(silent) as server:
        events.cancel_when = lambda: server.requests
        with pytest.raises(CancelledError):
            enhancer_for(server).enhance("a boat", None, events, on_failure=on_failure)
        assert time.monotonic() - events.cancelled_at < 10, "the time-out is 20 seconds"
        assert calls_ended()


def test_cancel_hangs_up_on_a_streaming_answer(events: Watcher) -> None:
    events.cancel_when = lambda: any(done > 0 for _, done, _ in events.reports)
    with CaptionServer(endless({"choices": [{"index": 0, "delta": {"content": "x"}}]})) as server:
        with pytest.raises(CancelledError):
            enhancer_for(server).enhance("a boat", None, events)
        assert server.hung_up.wait(10)
        assert calls_ended()


def test_enhancing_works_inside_a_running_event_loop(events: Watcher) -> None:
    async def node() -> Enhanced:
        return answer_of(streamed(GOOD), events=events)[0]

    assert asyncio.run(node()).caption == T2V


def test_the_original_prompt_is_passed_on_if_the_user_chose_that(events: Watcher) -> None:
    with CaptionServer(refused(401, f"bad key {KEY}")) as server:
        result = enhancer_for(server).enhance(" a boat\n", None, events, on_failure="original")
    assert result.prompt == " a boat\n"
    assert result.caption is None
    assert result.caption_json == ""
    assert "used as it is, without enhancement" in result.warnings[0]
    assert "(401)" in result.warnings[0]
    assert events.lines[-1] == result.warnings[0]


def test_captions_are_kept_by_content(tmp_path: Path, events: Watcher) -> None:
    def calls(server: CaptionServer, enhancer: Enhancer, *request: Any, **options: Any) -> int:
        before = len(server.requests)
        assert enhancer.enhance(*request, events, **options).caption is not None
        return len(server.requests) - before

    with CaptionServer(streamed(GOOD)) as server:
        enhancer = enhancer_for(server, cache_folder=tmp_path)
        assert calls(server, enhancer, "a boat", None) == 1
        assert calls(server, enhancer, "a boat", None) == 0
        assert enhancer.enhance("a boat", None, events).from_cache
        assert calls(server, enhancer, "a ship", None) == 1
        assert calls(server, enhancer, "a boat", None, variation="2") == 1
        assert "variation 2" in server.requests[-1]["messages"][0]["content"][0]["text"]
        later = enhancer_for(server, cache_folder=tmp_path)
        assert calls(server, later, "a boat", None) == 0
        other = Enhancer(Endpoint(base_url=server.url, model="another", key=KEY), cache_folder=tmp_path)
        assert calls(server, other, "a boat", None) == 1
    assert not any(KEY in file.read_text() + file.name for file in tmp_path.iterdir())


def test_the_content_of_a_picture_decides_not_its_name(tmp_path: Path, events: Watcher) -> None:
    first, second = tmp_path / "a.png", tmp_path / "b.png"
    Image.new("RGB", (8, 6), (10, 200, 30)).save(first)
    second.write_bytes(first.read_bytes())
    with CaptionServer(streamed(json.dumps(I2V))) as server:
        enhancer = enhancer_for(server)
        enhancer.enhance("x", first, events)
        enhancer.enhance("x", second, events)
        Image.new("RGB", (8, 6), (0, 0, 0)).save(second)
        enhancer.enhance("x", second, events)
    assert len(server.requests) == 2


def test_a_kept_caption_is_safe_from_changes(events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server:
        enhancer = enhancer_for(server)
        for _ in range(3):
            caption = enhancer.enhance("a boat", None, events).caption
            assert caption == T2V
            caption.clear()
    assert len(server.requests) == 1


# --- the user's side -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_nothing_to_enhance_gets_a_sentence(prompt: str, events: Watcher) -> None:
    with pytest.raises(RequestError, match="no prompt to enhance"):
        Enhancer(Endpoint(key=KEY)).enhance(prompt, None, events, on_failure="original")


@pytest.mark.parametrize("prompt", ["a\0", "a\ud800"])
def test_unusable_characters_are_found_before_anything_is_sent(prompt: str, events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server, pytest.raises(RequestError, match="position 1"):
        enhancer_for(server).enhance(prompt, None, events)
    assert server.requests == []


@pytest.mark.parametrize(
    "prompt", ["一只猫坐在窗边", "猫が窓辺に", "고양이", "قطة", "🎬🚀", '{"global_layer": {}}', "w " * 20_000]
)
def test_prompts_in_every_script_arrive_as_typed(prompt: str, events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server:
        enhancer_for(server).enhance(prompt, None, events)
    assert prompt in server.requests[0]["messages"][0]["content"][0]["text"]


def test_places_typed_by_the_user_are_not_filled(events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server:
        enhancer_for(server).enhance("X{variation_seed}Y {user_prompt}", None, events)
    assert "XY {user_prompt}" in server.requests[0]["messages"][0]["content"][0]["text"]


def test_users_can_replace_the_instruction_text(tmp_path: Path, events: Watcher) -> None:
    (tmp_path / "enhance_t2v.md").write_text("My own words: {user_prompt}", encoding="utf-8")
    _, server = answer_of(streamed(GOOD), events=events, texts_folder=tmp_path)
    assert server.requests[0]["messages"][0]["content"][0]["text"] == "My own words: a boat"


def test_a_variation_is_another_request_also_with_an_instruction_that_has_no_place_for_it(
    tmp_path: Path, events: Watcher
) -> None:
    (tmp_path / "enhance_t2v.md").write_text("Film this: {user_prompt}")
    with CaptionServer(streamed(GOOD), streamed(GOOD)) as server:
        enhancer = enhancer_for(server, texts_folder=tmp_path)
        for variation in ("", "1"):
            assert not enhancer.enhance("a boat", None, events, variation=variation).from_cache
        texts = [request["messages"][0]["content"][0]["text"] for request in server.requests]
    assert texts[0] == "Film this: a boat"
    assert texts[1].startswith("Film this: a boat\n\nThis is variation 1:")


def test_an_instruction_without_a_place_for_the_prompt_gets_a_sentence(tmp_path: Path, events: Watcher) -> None:
    (tmp_path / "enhance_t2v.md").write_text("no place", encoding="utf-8")
    with CaptionServer(streamed(GOOD)) as server:
        assert "must hold {user_prompt}" in failure(enhancer_for(server, texts_folder=tmp_path), events)


def test_an_absent_client_library_gets_a_sentence(monkeypatch: pytest.MonkeyPatch, events: Watcher) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    enhancer = Enhancer(Endpoint(key=KEY))
    with pytest.raises(MissingDependencyError, match="pip install openai"):
        enhancer.enhance("a boat", None, events)
    assert enhancer.enhance("a boat", None, events, on_failure="original").prompt == "a boat"


# --- where the endpoint comes from -----------------------------------------------------------------------------------


def test_enhancement_is_off_without_key_and_address(tmp_path: Path) -> None:
    assert find_endpoint(tmp_path, {}) is None
    assert find_endpoint(None, {"MAGI2_ENHANCE_MODEL": "m", "MAGI2_ENHANCE_API_KEY": "  "}) is None


def test_the_environment_decides_before_the_settings_file(tmp_path: Path) -> None:
    settings = {"api_key": "from-file", "base_url": "http://localhost:8000/v1", "model": "file", "timeout": 30}
    (tmp_path / "magi2_enhance.json").write_text(json.dumps(settings))
    assert find_endpoint(tmp_path, {}) == Endpoint("http://localhost:8000/v1", "file", "from-file", 30.0)
    environment = {"MAGI2_ENHANCE_API_KEY": f" {KEY}\n", "MAGI2_ENHANCE_MODEL": "env", "MAGI2_ENHANCE_TIMEOUT": "7.5"}
    assert find_endpoint(tmp_path, environment) == Endpoint("http://localhost:8000/v1", "env", KEY, 7.5)


def test_a_settings_file_may_begin_with_a_byte_order_mark_and_may_not_be_all_brackets(tmp_path: Path) -> None:
    file = tmp_path / "magi2_enhance.json"
    file.write_text(json.dumps({"base_url": "http://localhost:8000/v1"}), encoding="utf-8-sig")
    assert find_endpoint(tmp_path, {}) is not None
    file.write_text("[" * 100_000)
    with pytest.raises(RequestError, match="is not a JSON object like"):
        find_endpoint(tmp_path, {})


def test_a_key_is_sent_to_no_server_that_was_not_named() -> None:
    assert find_endpoint(None, {"MAGI2_ENHANCE_API_KEY": KEY}) is None


def test_the_default_model_is_that_of_the_protocol() -> None:
    endpoint = find_endpoint(None, {"MAGI2_ENHANCE_BASE_URL": "http://localhost:8000/v1"})
    assert endpoint is not None
    assert endpoint.model == "gemini-3.1-pro-preview"


def test_a_local_server_needs_no_key(events: Watcher) -> None:
    with CaptionServer(streamed(GOOD)) as server:
        endpoint = find_endpoint(None, {"MAGI2_ENHANCE_BASE_URL": server.url})
        assert endpoint is not None
        assert Enhancer(endpoint).enhance("a boat", None, events).caption == T2V


def test_the_key_is_not_in_the_representation() -> None:
    assert KEY not in repr(Endpoint(key=KEY)) + str(Endpoint(key=KEY))


@pytest.mark.parametrize("content", [f'{{"api_key": "{KEY}', f'["{KEY}"]', f"api_key={KEY}"])
def test_a_broken_settings_file_gets_a_sentence_without_its_content(tmp_path: Path, content: str) -> None:
    (tmp_path / "magi2_enhance.json").write_text(content)
    with pytest.raises(RequestError, match="is not a JSON object like") as caught:
        find_endpoint(tmp_path, {})
    assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("key", [f"{KEY}\n{KEY}", f"{KEY} x", f"{KEY}é"])
def test_a_key_with_impossible_characters_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(RequestError, match="MAGI2_ENHANCE_API_KEY") as caught:
        Endpoint(key=key)
    assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://x", "http://", "", "http://[::1", "http://h:99999/v1"])
def test_an_impossible_address_gets_a_sentence(address: str) -> None:
    with pytest.raises(RequestError, match="must start with http:// or https://"):
        Endpoint(base_url=address, key=KEY)


@pytest.mark.parametrize("timeout", ["soon", "-1", "0", "nan"])
def test_an_impossible_time_out_gets_a_sentence(timeout: str) -> None:
    with pytest.raises(RequestError, match="time-out"):
        find_endpoint(None, {"MAGI2_ENHANCE_BASE_URL": "http://x", "MAGI2_ENHANCE_TIMEOUT": timeout})
