"""From one line to an edited clip: a real ComfyUI, its real page, and a language model that this test plays."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.magi2_core.conditioning.compose import CaptionForm, compose_caption
from magi2_native.magi2_core.conditioning.markdown import render_markdown
from magi2_native.tests.caption_server import CaptionServer, Handler, refused, streamed
from magi2_native.tests.comfy_server.client import (
    clip_of,
    files,
    node_of,
    run,
    small_prompt,
    submit,
    wait,
)
from magi2_native.tests.comfy_server.page import PAGES, Page, need_browser, open_page, server_of
from magi2_native.tests.comfy_server.server import PACK, Server

KEY = "sk-Secret_Key-93847561"
# complete, but short: a miniature's tokenizer makes a token of nearly every letter
CAPTION = compose_caption(CaptionForm(context="A storm", timeline="waves hit the wall", ambience="wind"))


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Server, CaptionServer], None]]:
    """Names the language model in a server's user folder. Afterwards the key is searched for in everything that the
    server has kept, printed or answers."""
    used: list[tuple[Server, Path]] = []

    def name(comfy: Server, captions: CaptionServer) -> None:
        settings = comfy.base / "user" / "magi2" / "magi2_enhance.json"
        settings.parent.mkdir(exist_ok=True)
        settings.write_text(json.dumps({"base_url": captions.url, "model": "a-model", "api_key": KEY}))
        used.append((comfy, settings))

    yield name
    for comfy, settings in used:
        settings.unlink(missing_ok=True)
        kept = (file for folder in ("output", "temp", "user", "input") for file in (comfy.base / folder).rglob("*"))
        assert not [file for file in kept if file.is_file() and KEY.encode() in file.read_bytes()]
        answers = (comfy.get(path) for path in ("/history", "/queue", "/magi2/status", "/object_info"))
        assert not [answer for answer in answers if KEY in json.dumps(answer)]
        assert KEY not in comfy.log


def line_to_clip(**caption: Any) -> Any:
    """The shipped template, small, with changed inputs of Magi2Caption, and without passing failures on."""
    prompt = small_prompt("enhance_to_clip")
    prompt[node_of(prompt, "Magi2EnhancePrompt")]["inputs"]["on_failure"] = "stop"
    prompt[node_of(prompt, "Magi2Caption")]["inputs"] |= caption
    return prompt


def saved_prompt(clip: Path) -> Any:
    """What was encoded, as the latent's file beside the clip says."""
    from safetensors import safe_open

    with safe_open(clip, framework="pt") as file:
        return json.loads(file.metadata()["meta"])["prompt"]


def test_a_line_becomes_a_clip_of_its_caption(comfy: Server, set_up: Any) -> None:
    with CaptionServer(streamed(json.dumps(CAPTION))) as captions:
        set_up(comfy, captions)
        prompt = line_to_clip()
        finished = run(comfy, prompt)
        found = files(comfy, finished)
        facts = read_back(found[node_of(prompt, "SaveVideo")])
        assert (facts.frames, facts.width, facts.height, facts.frame_rate) == clip_of(prompt)
        assert saved_prompt(found["latent"]) == render_markdown(CAPTION)
        (text,) = finished.outputs[node_of(prompt, "Magi2Caption")]["text"]
        assert render_markdown(CAPTION) in text
        tokens = int(text.split()[0])
        assert f"{tokens} tokens" in finished.outputs[node_of(prompt, "Magi2EncodePrompt")]["text"][0]
        again = run(comfy, line_to_clip())
    assert set(prompt) == again.cached
    assert len(captions.requests) == 1
    assert captions.headers[0]["authorization"] == f"Bearer {KEY}"
    (line,) = [line for line in comfy.log.splitlines() if line.startswith("Sending the prompt")][-1:]
    assert line == f"Sending the prompt to a-model at {captions.url.split('/')[2]}."


def test_a_refused_key_ends_the_run_in_a_sentence(comfy: Server, set_up: Any) -> None:
    with CaptionServer(refused(401, f"wrong key {KEY}")) as captions:
        set_up(comfy, captions)
        prompt = line_to_clip()
        prompt[node_of(prompt, "Magi2EnhancePrompt")]["inputs"]["variation"] = 2
        finished = wait(comfy, submit(comfy, prompt))
    assert finished.status == "error"
    assert "refused the key (401); check MAGI2_ENHANCE_API_KEY" in finished.error
    assert "wrong key [hidden]" in finished.error


def test_cancel_while_the_language_model_thinks_is_no_error(comfy: Server, set_up: Any) -> None:
    def think(handler: Handler) -> None:
        time.sleep(30)

    with CaptionServer(think) as captions:
        set_up(comfy, captions)
        prompt = line_to_clip()
        prompt[node_of(prompt, "Magi2EnhancePrompt")]["inputs"]["variation"] = 3
        prompt_id = submit(comfy, prompt)
        deadline = time.monotonic() + 30
        while not captions.requests and time.monotonic() < deadline:
            time.sleep(0.05)
        pressed = time.monotonic()
        comfy.request("/interrupt", {})
        finished = wait(comfy, prompt_id)
        assert time.monotonic() - pressed < 5
    assert finished.interrupted
    assert "execution_error" not in finished.messages


# ---- in the page, as a new user does it


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, comfy: Server, start_comfy: Callable[..., Server]) -> Iterator[Page]:
    need_browser()
    with open_page(server_of(request.param, comfy, start_comfy)) as page:
        yield page
        assert page.problems == []


WIDGET = """([type, name]) => {
    const node = window.app.graph._nodes.find((each) => each.type === type);
    return node.widgets.find((each) => each.name === name)?.value ?? null;
}"""
TYPE_INTO = """([type, name, value]) => {
    const node = window.app.graph._nodes.find((each) => each.type === type);
    const widget = node.widgets.find((each) => each.name === name);
    widget.value = value;
    widget.callback?.(value);
}"""
PRESS = """([type, name]) => {
    const node = window.app.graph._nodes.find((each) => each.type === type);
    node.widgets.find((each) => each.name === name).callback();
}"""


def press_run(page: Page, times: int) -> None:
    """Queue the page's graph, and wait for the end of this run, the `times`-th."""
    page.run("() => { window.app.queuePrompt(0, 1); }")
    page.wait("(times) => window.magi2Heard.length === times", times, seconds=120)
    name, detail = page.run("() => window.magi2Heard.at(-1)")
    assert name == "execution_success", detail


def test_a_line_becomes_a_caption_that_is_edited_in_the_node_and_runs(page: Page, set_up: Any) -> None:
    server = page.server
    videos = server.base / "output" / "video"
    before = set(videos.glob("*.mp4"))
    text = (PACK / "workflows" / "enhance_to_clip.json").read_text(encoding="utf-8")
    with CaptionServer(streamed(json.dumps(CAPTION))) as captions:
        set_up(server, captions)
        page.drop_workflow("enhance_to_clip.json", text)
        page.wait("(count) => window.app.graph._nodes.length === count", len(json.loads(text)["nodes"]))
        page.shrink()
        page.listen("execution_success", "execution_error", "execution_interrupted")
        line = f"{{red|blue}} (boats:1.2) in a storm // seen in {page.tab.url}"
        page.run(TYPE_INTO, ["Magi2EnhancePrompt", "prompt", line])
        press_run(page, 1)
        (request,) = captions.requests
        assert line in request["messages"][0]["content"][0]["text"], "neither the page nor the server rewrites it"
        page.wait(WIDGET, ["Magi2Caption", "magi2_text"])
        shown = page.run(WIDGET, ["Magi2Caption", "magi2_text"])
        assert "Stopped here" in shown
        assert CAPTION["global_layer"]["context"] in shown
        assert set(videos.glob("*.mp4")) == before, "nothing is generated before the edit"

        page.run(PRESS, ["Magi2Caption", "magi2_edit"])
        caption = json.loads(page.run(WIDGET, ["Magi2Caption", "edited_caption"]))
        assert caption == CAPTION
        caption["global_layer"]["audio_baseline"]["ambience"] = "complete silence"
        page.run(TYPE_INTO, ["Magi2Caption", "edited_caption", json.dumps(caption)])
        press_run(page, 2)
        assert len(captions.requests) == 1, "the edit asks for nothing new"
    (clip,) = set(videos.glob("*.mp4")) - before
    facts = read_back(clip)
    assert (facts.frames, facts.width, facts.height) == (125, 64, 32)
    shown = page.run(WIDGET, ["Magi2Caption", "magi2_text"])
    assert shown.endswith(render_markdown(caption))
    assert "ambience:complete silence" in shown
    saved = page.workflow()
    (node,) = [node for node in saved["nodes"] if node["type"] == "Magi2Caption"]
    assert shown not in node["widgets_values"], "what is shown is not saved"
    assert len(node["widgets_values"]) == len(page.prompt()[str(node["id"])]["inputs"]) - 2, "all but the two links"
