"""Magi2EnhancePrompt against a real server on this machine; the key must show up nowhere (30 §10)."""

import base64
import io
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.magi2_core.conditioning.markdown import render_markdown
from magi2_native.tests.caption_server import CaptionServer, Step, calls_ended, refused, silent, streamed
from magi2_native.tests.comfy_stub import execute
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in
from PIL import Image

CAPTIONS = Path(__file__).resolve().parent.parent / "workflows" / "captions"
KEY = "sk-Secret_Key-93847561"
T2V, I2V = (json.loads((CAPTIONS / f"{name}.json").read_text()) for name in ("text_potter", "picture_lighthouse"))
GOOD = streamed(json.dumps(T2V))


@pytest.fixture(params=[Exception, BaseException], ids=["interrupt-is-Exception", "interrupt-is-BaseException"])
def any_graph(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path, request.param) as graph:
        yield graph


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path) as graph:
        yield graph


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in [name for name in os.environ if name.startswith("MAGI2_ENHANCE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def the_key_shows_up_nowhere(
    request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[None]:  # fmt: skip
    """Every log line, everything printed or sent to the page, and every file but the user's own is searched."""
    (name,) = {"graph", "any_graph"} & set(request.fixturenames)
    page = request.getfixturevalue(name).stub.server
    caplog.set_level(logging.DEBUG)
    yield
    printed = capfd.readouterr()
    seen = [caplog.text, printed.out, printed.err, repr(page.texts), repr(page.sent), repr(page.progress)]
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "magi2_enhance.json"]
    assert not [file for file in files if KEY.encode() in file.read_bytes() or KEY in file.name]
    assert not [text for text in seen if KEY in text]


def set_up(graph: Graph, server: CaptionServer, **changes: Any) -> Path:
    """Write the settings file into ComfyUI's user folder, as a user does."""
    folder = graph.stub.folder_paths.base / "user" / "magi2"
    folder.mkdir(exist_ok=True)
    settings = {"base_url": server.url, "model": "a-model", "api_key": KEY, "timeout": 20, **changes}
    (folder / "magi2_enhance.json").write_text(json.dumps(settings))
    return folder


def enhance(graph: Graph, prompt: str = "a potter", **inputs: Any) -> Any:
    """The node's whole result, none of which may hold the key."""
    result = execute(graph.nodes["Magi2EnhancePrompt"], node_id="3", prompt=prompt, **inputs)
    assert KEY not in repr((result.args, result.ui.value))
    return result


def failure(graph: Graph, **inputs: Any) -> str:
    with pytest.raises(graph.stub.module("magi2_core.errors").RequestError) as caught:
        enhance(graph, **inputs)
    assert KEY not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


def fingerprint(graph: Graph, prompt: str = "a potter", variation: int = 0) -> Any:
    found = graph.nodes["Magi2EnhancePrompt"].fingerprint_inputs(prompt=prompt, variation=variation)
    assert KEY not in repr(found)
    return found


def restart(graph: Graph) -> None:
    """Forget what the process remembers, as a restart of ComfyUI does."""
    graph.stub.module("stages.enhance")._enhancer.cache_clear()


def test_a_line_becomes_text_for_the_encoder_and_json_for_the_caption_node(graph: Graph) -> None:
    with CaptionServer(GOOD) as server:
        set_up(graph, server)
        prompt, caption = enhance(graph).args
        assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    assert prompt == render_markdown(T2V)
    assert json.loads(caption) == T2V
    assert graph.run("Magi2Caption", caption=caption)[0] == prompt
    assert graph.pools == [], "no workers are needed"


def test_the_node_says_what_is_sent_where_before_it_is_sent_and_then_shows_the_caption(graph: Graph) -> None:
    told: list[str] = []

    def answer(handler: Any) -> None:
        told.extend(text for _, text in graph.stub.server.texts)
        GOOD(handler)

    with CaptionServer(answer) as server:
        set_up(graph, server)
        host = f"127.0.0.1:{server.server_address[1]}"
        text = enhance(graph).ui.value
    assert f"Sending the prompt to a-model at {host}." in told
    assert text.startswith(f"The caption was made by a-model at {host}.\n")
    assert json.loads(text[text.index("{") :]) == T2V
    assert graph.stub.server.texts[-1] == ("3", text)


def test_the_environment_comes_before_the_file(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    with CaptionServer(GOOD) as server:
        set_up(graph, server, model="from the file")
        monkeypatch.setenv("MAGI2_ENHANCE_MODEL", "from the environment")
        enhance(graph)
    assert server.requests[0]["model"] == "from the environment"


def test_a_picture_is_sent_as_jpeg_and_asks_for_the_other_caption(graph: Graph) -> None:
    image = torch.zeros(1, 6, 8, 3)
    image[..., 1] = 0.8
    with CaptionServer(streamed(json.dumps(I2V))) as server:
        set_up(graph, server)
        prompt, caption = enhance(graph, image=image).args
    assert (prompt, json.loads(caption)) == (render_markdown(I2V), I2V)
    url = server.requests[0]["messages"][0]["content"][1]["image_url"]["url"]
    sent = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    assert sent.size == (8, 6)
    assert sent.getpixel((4, 3))[1] == pytest.approx(204, abs=6)  # type: ignore[index]
    assert any("Sending the prompt and the picture to" in text for _, text in graph.stub.server.texts)


def test_several_pictures_are_refused(graph: Graph) -> None:
    with CaptionServer(GOOD) as server:
        set_up(graph, server)
        assert "2 pictures arrived" in failure(graph, image=torch.zeros(2, 6, 8, 3))
    assert server.requests == []


# ---- asked once


def test_the_same_question_is_asked_once_also_after_a_restart(graph: Graph) -> None:
    with CaptionServer(GOOD) as server:
        folder = set_up(graph, server)
        first = enhance(graph)
        assert enhance(graph).args == first.args
        restart(graph)
        again = enhance(graph)
        assert again.args == first.args
        assert "kept from an earlier run" in again.ui.value
        assert len(server.requests) == 1
        assert len(list((folder / "captions").iterdir())) == 1
        enhance(graph, variation=1)
        enhance(graph, prompt="a boat")
        assert len(server.requests) == 3
    wishes = [request["messages"][0]["content"][0]["text"] for request in server.requests]
    assert ["variation 1" in wish for wish in wishes] == [False, True, False]


def test_another_model_counts_as_a_change_and_a_new_key_does_not(graph: Graph) -> None:
    with CaptionServer(GOOD) as server:
        set_up(graph, server)
        before = fingerprint(graph)
        set_up(graph, server, api_key="sk-another-key")
        assert fingerprint(graph) == before
        set_up(graph, server, model="another")
        assert fingerprint(graph) != before
        assert server.url not in repr(fingerprint(graph)), "it is kept in saved files"
        (set_up(graph, server) / "magi2_enhance.json").write_text("broken")
        assert isinstance(fingerprint(graph), str), "a fingerprint never raises"


def test_own_instructions_count_as_a_change_and_are_used(graph: Graph) -> None:
    with CaptionServer(GOOD) as server:
        folder = set_up(graph, server)
        enhance(graph)
        before = fingerprint(graph)
        (folder / "enhance_t2v.md").write_text("In my own words: {user_prompt}")
        assert fingerprint(graph) != before
        enhance(graph)
    assert server.requests[1]["messages"][0]["content"][0]["text"] == "In my own words: a potter"


# ---- failure


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        (refused(401, f"bad key {KEY}"), "refused the key (401)"),
        (refused(429, "slow down"), "is limiting requests (429)"),
        (refused(500, "oops"), "failed (500)"),
        (streamed("I cannot do that."), "made no usable caption"),
    ],
    ids=["401", "429", "500", "talk"],
)
def test_a_failure_is_one_sentence_or_the_prompt_as_it_was(graph: Graph, step: Step, sentence: str) -> None:
    with CaptionServer(step) as server:
        set_up(graph, server)
        assert sentence in failure(graph)
        passed = enhance(graph, on_failure="original")
    assert passed.args == ("a potter", "a potter")
    assert "was used as it is, without enhancement" in passed.ui.value
    assert sentence in passed.ui.value


def test_a_prompt_that_was_used_as_it_is_is_tried_again(graph: Graph) -> None:
    with CaptionServer(refused(403, "quota"), GOOD) as server:
        set_up(graph, server)
        before, other, linked = fingerprint(graph), fingerprint(graph, "a boat"), fingerprint(graph, None)
        enhance(graph, on_failure="original")
        assert fingerprint(graph) != before, "or ComfyUI would keep the outcome"
        assert fingerprint(graph, None) != linked, "a linked prompt is not known yet"
        assert fingerprint(graph, "a boat") == other
        after = fingerprint(graph)
        assert json.loads(enhance(graph, on_failure="original").args[1]) == T2V
        assert fingerprint(graph) == after


def test_a_silent_server_is_given_up_in_a_sentence(graph: Graph) -> None:
    with CaptionServer(silent) as server:
        set_up(graph, server, timeout=0.2)
        assert "time-out 0.2 s" in failure(graph)


def test_without_a_set_up_nothing_is_sent_and_the_sentence_says_how_to_make_one(graph: Graph) -> None:
    sentence = failure(graph)
    assert "MAGI2_ENHANCE_BASE_URL" in sentence
    assert str(Path("user") / "magi2" / "magi2_enhance.json") in sentence
    passed = enhance(graph, on_failure="original")
    assert passed.args[0] == "a potter"
    assert "No language model is set up" in passed.ui.value


def test_a_broken_settings_file_is_named_but_not_quoted(graph: Graph) -> None:
    with CaptionServer(GOOD) as server:
        (set_up(graph, server) / "magi2_enhance.json").write_text(f'{{"api_key": "{KEY}", ')
    sentence = failure(graph)
    assert "magi2_enhance.json is not a JSON object" in sentence


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"prompt": " "}, "prompt is empty"),
        ({"prompt": "nul \0"}, "NUL"),
        ({"on_failure": "cry"}, "stop, original"),
        ({"variation": -1}, "variation is -1"),
    ],
)
def test_bad_inputs_are_refused_at_both_doors(graph: Graph, inputs: dict[str, Any], message: str) -> None:
    assert message in graph.nodes["Magi2EnhancePrompt"].validate_inputs(**inputs)
    with CaptionServer(GOOD) as server:
        set_up(graph, server)
        assert message in failure(graph, **inputs)
    assert server.requests == []


# ---- cancel


@pytest.mark.parametrize("on_failure", ["stop", "original"])
def test_cancel_hangs_up_at_once_and_reaches_comfyui_as_it_was(any_graph: Graph, on_failure: str) -> None:
    management = any_graph.stub.model_management
    pressed: list[float] = []

    def press_cancel(handler: Any) -> None:
        pressed.append(time.monotonic())
        management.interrupt_current_processing(True)
        silent(handler)

    with CaptionServer(press_cancel) as server:
        set_up(any_graph, server)
        with pytest.raises(management.InterruptProcessingException) as caught:
            enhance(any_graph, on_failure=on_failure)
        assert time.monotonic() - pressed[0] < 10, "the time-out is 20 seconds"
        assert calls_ended()
    assert type(caught.value) is management.InterruptProcessingException
    with CaptionServer(GOOD) as server:
        set_up(any_graph, server)
        assert json.loads(enhance(any_graph).args[1]) == T2V
