"""The pack's routes: who may change what, and what they tell (60 §11, 80 line 29)."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in

pytest.importorskip("aiohttp", reason="the server brings aiohttp")

JSON = {"Content-Type": "application/json", "Host": "10.0.0.5:8188"}
POSTS = ["/magi2/start", "/magi2/stop", "/magi2/unload", "/magi2/settings"]


class Request:
    def __init__(self, headers: dict[str, str], body: bytes) -> None:
        self.headers, self.content, self._body = headers, self, body

    async def iter_any(self) -> AsyncIterator[bytes]:
        for begin in range(0, len(self._body), 100):
            yield self._body[begin : begin + 100]


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path) as graph:
        yield graph


def ask(graph: Graph, method: str, path: str, headers: dict[str, str] = JSON, body: Any = None) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    answer = asyncio.run(graph.stub.server.routes.handlers[method, path](Request(headers, raw)))
    return answer.status, json.loads(answer.text)


def test_changes_are_post_only(graph: Graph) -> None:
    handlers = graph.stub.server.routes.handlers
    assert {path for method, path in handlers if method == "GET"} == {"/magi2/status"}
    assert {path for method, path in handlers if method == "POST"} == set(POSTS)


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {**JSON, "Origin": "http://evil.example"},
        {**JSON, "Origin": "http://10.0.0.5:9999"},
        {**JSON, "Origin": "null"},
        {**JSON, "Content-Type": "text/plain"},
        {**JSON, "Content-Type": "application/x-www-form-urlencoded"},
        {"Host": "10.0.0.5:8188"},
        {**JSON, "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_foreign_requests_are_refused_and_change_nothing(graph: Graph, path: str, headers: dict[str, str]) -> None:
    graph.conditioning()
    status, _ = ask(graph, "POST", path, headers, {"give_up": "always"})
    assert status == 403
    assert graph.manager.alive
    assert ask(graph, "GET", "/magi2/status")[1]["settings"]["give_up"] == "when asked"


def test_our_own_page_and_plain_clients_are_served(graph: Graph) -> None:
    graph.conditioning()
    assert ask(graph, "POST", "/magi2/unload", {**JSON, "Origin": "http://10.0.0.5:8188"})[0] == 200
    status, answer = ask(graph, "POST", "/magi2/stop", {**JSON, "Content-Type": "application/json; charset=utf-8"})
    assert (status, answer["state"]) == (200, "stopped")
    status, answer = ask(graph, "POST", "/magi2/start")
    assert (status, answer["state"]) == (200, "ready")


def test_starting_without_a_model_is_a_sentence(graph: Graph) -> None:
    status, answer = ask(graph, "POST", "/magi2/start")
    assert status == 409
    assert "run a workflow once" in answer["error"]


def test_workers_are_not_started_while_workflows_run(graph: Graph) -> None:
    """A start takes ComfyUI's models off the GPUs, one of which may be in the middle of a step."""
    graph.conditioning()
    graph.manager.stop()
    graph.stub.server.prompt_queue.tasks = 1
    status, answer = ask(graph, "POST", "/magi2/start")
    assert status == 409
    assert "ComfyUI is running a workflow" in answer["error"]
    assert not graph.manager.alive
    graph.stub.server.prompt_queue.tasks = 0
    assert ask(graph, "POST", "/magi2/start")[0] == 200
    assert graph.manager.alive


def test_a_start_that_fails_tells_why(graph: Graph) -> None:
    graph.conditioning()
    graph.manager.stop()
    graph.refuse_start = True
    status, answer = ask(graph, "POST", "/magi2/start")
    assert (status, answer) == (409, {"error": "Rank 1 did not join."})


@pytest.mark.parametrize(
    "body",
    [{"give_up": "sometimes"}, {"idle_minutes": -1}, {"idle_minutes": "5"}, {"idle_minutes": True}, [1], b"{x",
     b"[" * 4000],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(graph: Graph, body: Any) -> None:
    before = ask(graph, "GET", "/magi2/status")[1]["settings"]
    assert ask(graph, "POST", "/magi2/settings", body=body)[0] == 409
    assert ask(graph, "GET", "/magi2/status")[1]["settings"] == before


def test_settings_take_effect(graph: Graph) -> None:
    _, answer = ask(graph, "POST", "/magi2/settings", body={"give_up": "never", "idle_minutes": 15})
    assert answer["settings"] == {"give_up": "never", "idle_minutes": 15.0}


def test_large_bodies_are_refused(graph: Graph) -> None:
    assert ask(graph, "POST", "/magi2/settings", body=b'{"x": "' + b"a" * 5000 + b'"}')[0] == 409


def test_the_status_tells_no_file_paths(graph: Graph, tmp_path: Path) -> None:
    graph.conditioning()
    graph.manager.note(f"reading {tmp_path}/models/magi2/mini/preview/model.safetensors and 3/61 shards")
    _, answer = ask(graph, "GET", "/magi2/status")
    assert answer["log"][-1] == "reading mini/preview/model.safetensors and 3/61 shards"
    assert str(tmp_path) not in json.dumps(answer)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("BASE/models/magi2/my mini/preview/x.safetensors is cut short", "my mini/preview/x.safetensors is cut short"),
        ("no refiner in 'BASE/models/magi2', nor in BASE/output.", "no refiner in 'magi2', nor in output."),
        ("BASE/models/magi2-old/x.bin", "x.bin"),
        ("/data/BASE/output/x.bin", "x.bin"),
        ("C:\\Users\\me\\x.bin", "x.bin"),
        ("3/61 shards of mini/preview/x.bin", "3/61 shards of mini/preview/x.bin"),
    ],
)
def test_paths_in_the_log_begin_at_comfyuis_folders(graph: Graph, tmp_path: Path, text: str, shown: str) -> None:
    graph.manager.note(text.replace("BASE", str(tmp_path)).replace("//", "/"))
    assert ask(graph, "GET", "/magi2/status")[1]["log"][-1] == shown


def test_a_model_that_was_named_by_its_whole_path_is_shown_by_its_name(graph: Graph, tmp_path: Path) -> None:
    model = graph.model(checkpoint=str(tmp_path / "models" / "magi2" / "mini"))
    graph.run("Magi2EncodePrompt", model=model, prompt="a", negative_prompt="")
    assert ask(graph, "GET", "/magi2/status")[1]["model"] == "mini"


def test_pages_hear_of_changes(graph: Graph) -> None:
    graph.conditioning()
    states = [data["state"] for event, data in graph.stub.server.sent if event == "magi2.status"]
    assert states[0] == "starting"
    assert "busy" in states
    assert states[-1] == "ready"
