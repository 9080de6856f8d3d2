"""`magi2 queue` against a small server that speaks ComfyUI's protocol (60 §10)."""

import asyncio
import json
import resource
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from magi2_native.headless import queue
from magi2_native.headless.cli import main
from magi2_native.headless.queue import _read, _write, queue_workflow
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.comfy_server.client import small_prompt

web = pytest.importorskip("aiohttp.web", reason="magi2 queue needs aiohttp")

PROMPT_ID = "p-1"


class Comfy:
    """One prompt at a time; `ending` is the last message that the page would get."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        self.sockets: list[Any] = []
        self.submitted: Any = None
        self.submitted_id = ""
        self.node_errors: dict[str, Any] = {}
        self.status = 200
        self.ending: tuple[str, dict[str, Any]] = ("executing", {"node": None})
        self.hold = False
        self.drop_socket = False
        self.content = b"mp4 bytes"
        self.late = 0  # how often the server says that the prompt runs before the history has it
        self.upload_delay = 0.0  # seconds
        self.gone = False  # connections end without an answer
        self.halt_view = False  # a download stops after its first byte
        self.lost = False  # neither the queue nor the history has the prompt
        self.ctrl_c = False  # while the prompt is being submitted
        self.waiting: list[tuple[int, str]] = []
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([
            web.get("/ws", self.ws), web.post("/prompt", self.prompt), web.get("/history/{id}", self.history),
            web.get("/view", self.view), web.post("/upload/image", self.upload), web.get("/queue", self.queue),
            web.post("/queue", self.note), web.post("/interrupt", self.note),
            web.get("/object_info/{kind}", self.object_info),
        ])  # fmt: skip
        self.loop = asyncio.new_event_loop()
        self.answers = asyncio.Event()  # cleared, the server leaves questions about the queue open
        self.answers.set()
        self.runner = web.AppRunner(app)
        self.loop.run_until_complete(self.runner.setup())
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.halt_view = False
        self.loop.call_soon_threadsafe(self.answers.set)
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)

    async def ws(self, request: Any) -> Any:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sockets.append(socket)
        async for _ in socket:
            pass
        return socket

    async def prompt(self, request: Any) -> Any:
        body = await request.json()
        self.submitted, self.submitted_id = body["prompt"], body["prompt_id"]
        if self.ctrl_c:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await self.answers.wait()
        if self.status == 403:
            return web.Response(status=403)
        answer = {"node_errors": self.node_errors}
        if self.status != 200:
            answer["error"] = {"message": "Prompt outputs failed validation"}
        else:
            answer["prompt_id"] = PROMPT_ID
        if self.status == 200 and not self.node_errors:
            asyncio.get_running_loop().create_task(self.play())
        return web.json_response(answer, status=self.status)

    async def play(self) -> None:
        (socket,) = self.sockets
        await socket.send_bytes(b"\x00\x00\x00\x01a preview")
        messages = [
            ("progress", {"value": 9, "max": 9, "node": "3", "prompt_id": "someone else's"}),
            ("executing", {"node": "3"}),
            ("progress", {"value": 1, "max": 2, "node": "3"}),
            ("progress", {"value": 2, "max": 2, "node": "3"}),
        ]
        if not self.hold:
            messages.append(self.ending)
        for kind, data in messages:
            whose = {} if kind == "status" else {"prompt_id": PROMPT_ID}
            await socket.send_json({"type": kind, "data": {**whose, **data}})
        if self.drop_socket:
            await socket.close()

    async def history(self, request: Any) -> Any:
        if self.late or self.lost:
            return web.json_response({})
        clip = {"filename": "a b.mp4", "subfolder": "video", "type": "output"}
        preview = {"filename": "p.png", "subfolder": "", "type": "temp"}
        output = {"5": {"images": [clip], "animated": [True]}, "7": {"images": [preview], "text": ["hi"]}}
        return web.json_response({PROMPT_ID: {"outputs": output, "status": {"messages": []}}})

    async def view(self, request: Any) -> Any:
        self.seen.append(("/view", dict(request.query)))
        answer = web.StreamResponse()
        answer.content_length = len(self.content)
        await answer.prepare(request)
        await answer.write(self.content[:1])
        while self.halt_view:
            await asyncio.sleep(0.05)
        await answer.write(self.content[1:])
        return answer

    async def upload(self, request: Any) -> Any:
        await asyncio.sleep(self.upload_delay)
        form = await request.post()
        self.seen.append(("/upload/image", (form["image"].filename, form["image"].file.read(), form["subfolder"])))
        return web.json_response({"name": "renamed.png", "subfolder": form["subfolder"], "type": "input"})

    async def queue(self, request: Any) -> Any:
        await self.answers.wait()
        running = [(9, PROMPT_ID)] if self.late else []
        self.late = max(0, self.late - 1)
        return web.json_response({"queue_running": running, "queue_pending": self.waiting})

    async def object_info(self, request: Any) -> Any:
        inputs = {"required": {"model": ["MAGI2_MODEL"], "steps": ["INT"]}, "optional": {"options": ["X"]}}
        return web.json_response({request.match_info["kind"]: {"input": inputs}})

    async def note(self, request: Any) -> Any:
        await self.answers.wait()
        if self.gone:
            request.transport.abort()
        self.seen.append((request.path, await request.json()))
        return web.json_response({})


class Recording(Silent):
    def __init__(self) -> None:
        self.ticks: list[tuple[str, int, int]] = []
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, stage: str, done: int, total: int, latent: Any = None) -> None:
        self.ticks.append((stage, done, total))


@pytest.fixture
def comfy() -> Iterator[Comfy]:
    server = Comfy()
    yield server
    server.close()


def test_results_are_downloaded_and_progress_is_shown(comfy: Comfy, tmp_path: Path) -> None:
    events = Recording()
    written = queue_workflow(small_prompt(), comfy.url, tmp_path / "out", events)
    assert written == [tmp_path / "out" / "a b.mp4"], "temporary pictures stay where they are"
    assert written[0].read_bytes() == b"mp4 bytes"
    assert events.ticks == [("MAGI-2 Sampler", 1, 2), ("MAGI-2 Sampler", 2, 2)]
    assert comfy.seen == [("/view", {"filename": "a b.mp4", "subfolder": "video", "type": "output"})]


def test_a_history_that_comes_late_is_waited_for(comfy: Comfy, tmp_path: Path) -> None:
    comfy.late = 4
    assert queue_workflow(small_prompt(), comfy.url, tmp_path / "out", Silent())


def test_nothing_that_is_there_is_overwritten(comfy: Comfy, tmp_path: Path) -> None:
    told: list[Path] = []
    for content in (b"one", b"another", b"a third", b"one"):
        comfy.content = content
        comfy.sockets.clear()
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent(), told.append)
    assert [path.name for path in told] == ["a b.mp4", "a b-2.mp4", "a b-3.mp4", "a b.mp4"]
    assert [path.read_bytes() for path in told] == [b"one", b"another", b"a third", b"one"]


def test_an_output_folder_that_cannot_be_written_is_refused_before_the_work(comfy: Comfy, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(RequestError, match=r"output folder .* cannot be written"):
        queue_workflow(small_prompt(), comfy.url, tmp_path / "out", Silent())
    assert comfy.submitted is None


def test_who_waits_is_told_how_many_are_before(comfy: Comfy, tmp_path: Path) -> None:
    comfy.late, comfy.waiting, events = 4, [(3, "one"), (12, "later"), (5, "two")], Recording()
    queue_workflow(small_prompt(), comfy.url, tmp_path, events)
    assert "Queued; 2 before it." in events.lines


def test_setting_an_input_that_a_node_does_not_have_is_refused(
    comfy: Comfy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(small_prompt()))
    arguments = ["queue", str(path), "--server", comfy.url, "--output", str(tmp_path)]
    assert main([*arguments, "--set", "Magi2Sampler.step=9"]) == 1
    assert "Magi2Sampler (node 3) has no input step; it has model, steps, options." in capsys.readouterr().err
    assert comfy.submitted is None


def test_a_picture_that_is_not_here_is_named(comfy: Comfy, tmp_path: Path) -> None:
    events = Recording()
    queue_workflow(small_prompt("picture_to_clip"), comfy.url, tmp_path / "out", events, files_near=tmp_path)
    assert "There is no file example.png here to upload; the server must have it." in events.lines


def test_local_files_are_uploaded_and_renamed_in_the_workflow(comfy: Comfy, tmp_path: Path) -> None:
    workflow = small_prompt("picture_to_clip")
    (tmp_path / "example.png").write_bytes(b"a picture")
    queue_workflow(workflow, comfy.url, tmp_path / "out", Silent(), files_near=tmp_path)
    assert ("/upload/image", ("example.png", b"a picture", "magi2_uploads")) in comfy.seen
    (image,) = (node for node in comfy.submitted.values() if node["class_type"] == "LoadImage")
    assert image["inputs"]["image"] == "magi2_uploads/renamed.png"


def test_a_name_too_long_for_a_file_is_no_local_file(comfy: Comfy, tmp_path: Path) -> None:
    workflow, events = small_prompt("picture_to_clip"), Recording()
    (image,) = (node for node in workflow.values() if node["class_type"] == "LoadImage")
    image["inputs"]["image"] = "a" * 300
    assert queue_workflow(workflow, comfy.url, tmp_path / "out", events, files_near=tmp_path)
    assert f"There is no file {'a' * 300} here to upload; the server must have it." in events.lines


def test_a_link_to_a_node_that_is_not_there_is_refused_before_the_work(comfy: Comfy, tmp_path: Path) -> None:
    workflow = small_prompt()
    workflow["3"]["inputs"]["model"] = ["77", 0]
    with pytest.raises(RequestError, match=r"model of Magi2Sampler \(node 3\) is linked to node 77, which is not in"):
        queue_workflow(workflow, comfy.url, tmp_path, Silent())
    assert comfy.submitted is None


def test_a_refusal_without_words_is_told_by_its_number(comfy: Comfy, tmp_path: Path) -> None:
    comfy.status = 403
    with pytest.raises(RequestError, match="refused the workflow: 403 Forbidden"):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())


@pytest.mark.parametrize("status", [400, 200])
def test_a_workflow_that_is_refused_in_part_is_refused_whole(comfy: Comfy, tmp_path: Path, status: int) -> None:
    comfy.status = status
    comfy.node_errors = {"3": {"class_type": "Magi2Sampler", "errors": [{"message": "bad", "details": "steps is 0"}]}}
    with pytest.raises(RequestError, match=r"node 3 \(Magi2Sampler\): bad: steps is 0"):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())
    if status == 200:
        assert ("/queue", {"delete": [PROMPT_ID]}) in comfy.seen
        assert ("/interrupt", {"prompt_id": PROMPT_ID}) in comfy.seen


def test_what_the_server_repeats_for_every_input_is_told_once(comfy: Comfy, tmp_path: Path) -> None:
    errors = [
        {"type": "custom_validation_failed", "message": "Custom validation failed", "details": f"{name} - Steps is 0."}
        for name in ("seed", "steps", "shift")
    ]
    comfy.status, comfy.node_errors = 400, {"3": {"class_type": "Magi2Sampler", "errors": errors}}
    with pytest.raises(RequestError) as refused:
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())
    assert str(refused.value).splitlines()[1:] == ["  node 3 (Magi2Sampler): Steps is 0."]


def test_an_error_on_the_server_is_told_in_its_words(comfy: Comfy, tmp_path: Path) -> None:
    comfy.ending = ("execution_error", {"node_id": "3", "exception_message": "Rank 1 was killed by SIGKILL."})
    with pytest.raises(RequestError, match=r"MAGI-2 Sampler failed: Rank 1 was killed by SIGKILL."):
        queue_workflow(small_prompt(), comfy.url, tmp_path / "out", Silent())
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_someone_interrupts_is_a_failure(comfy: Comfy, tmp_path: Path) -> None:
    comfy.ending = ("execution_interrupted", {})
    with pytest.raises(RequestError, match="interrupted on the server"):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())


def test_ctrl_c_takes_the_prompt_back(comfy: Comfy, tmp_path: Path) -> None:
    comfy.hold = True

    class Pressing(Silent):
        def progress(self, stage: str, done: int, total: int, latent: Any = None) -> None:
            if done == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Pressing())
    assert ("/interrupt", {"prompt_id": PROMPT_ID}) in comfy.seen
    assert ("/queue", {"delete": [PROMPT_ID]}) in comfy.seen


def test_ctrl_c_takes_back_a_prompt_that_is_not_acknowledged_yet(comfy: Comfy, tmp_path: Path) -> None:
    comfy.ctrl_c = True
    comfy.answers.clear()
    threading.Timer(0.5, lambda: comfy.loop.call_soon_threadsafe(comfy.answers.set)).start()
    with pytest.raises(KeyboardInterrupt):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())
    assert ("/queue", {"delete": [comfy.submitted_id]}) in comfy.seen
    assert ("/interrupt", {"prompt_id": comfy.submitted_id}) in comfy.seen


@pytest.mark.timeout(30)
@pytest.mark.parametrize("told", [True, False])
def test_a_prompt_that_someone_takes_from_the_queue_is_lost(
    comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    comfy.lost = True
    comfy.ending = ("status", {"status": {"exec_info": {"queue_remaining": 0}}})
    if not told:
        comfy.hold = True
        monkeypatch.setattr(queue, "SILENT_SECONDS", 0.2)
    with pytest.raises(RequestError, match="The server has lost the prompt"):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())


@pytest.mark.timeout(30)
def test_a_prompt_that_runs_in_silence_is_waited_for(
    comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "SILENT_SECONDS", 0.1)
    comfy.hold, comfy.late = True, 4
    assert queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())


class Pressing(Recording):
    """Does something when both steps are done."""

    def __init__(self, press: Callable[[], None]) -> None:
        super().__init__()
        self.press = press

    def progress(self, stage: str, done: int, total: int, latent: Any = None) -> None:
        if done == 2:
            self.press()


STOPPED = "The server does not answer; the prompt may still run there."


@pytest.mark.timeout(30)
def test_a_server_that_stops_answering_is_given_up(
    comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("READ_SECONDS", "WITHDRAW_SECONDS"):
        monkeypatch.setattr(queue, limit, 0.3)
    comfy.answers.clear()
    events = Recording()
    with pytest.raises(RequestError, match="does not answer as ComfyUI does: Timeout on reading"):
        queue_workflow(small_prompt(), comfy.url, tmp_path, events)
    assert STOPPED in events.lines


@pytest.mark.timeout(30)
def test_one_ctrl_c_ends_the_command_although_the_server_stopped_answering(
    comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "WITHDRAW_SECONDS", 0.3)
    comfy.hold = True

    def press() -> None:
        comfy.answers.clear()
        signal.raise_signal(signal.SIGINT)

    events = Pressing(press)
    with pytest.raises(KeyboardInterrupt):
        queue_workflow(small_prompt(), comfy.url, tmp_path, events)
    assert STOPPED in events.lines


def test_ctrl_c_is_no_failure_although_the_server_is_gone(comfy: Comfy, tmp_path: Path) -> None:
    comfy.hold = True

    def press() -> None:
        comfy.gone = True
        raise KeyboardInterrupt

    events = Pressing(press)
    with pytest.raises(KeyboardInterrupt):
        queue_workflow(small_prompt(), comfy.url, tmp_path, events)
    assert STOPPED in events.lines


@pytest.mark.timeout(30)
def test_a_download_that_stops_is_given_up_and_leaves_nothing(
    comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "READ_SECONDS", 0.3)

    comfy.halt_view = True
    with pytest.raises(RequestError, match="does not answer as ComfyUI does: Timeout on reading"):
        queue_workflow(small_prompt(), comfy.url, tmp_path, Silent())
    assert list(tmp_path.iterdir()) == []


def test_an_upload_may_take_longer_than_an_answer(
    comfy: Comfy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "READ_SECONDS", 0.3)
    comfy.upload_delay = 1.0
    (tmp_path / "example.png").write_bytes(bytes(32 << 20))  # more than the sockets hold
    assert queue_workflow(small_prompt("picture_to_clip"), comfy.url, tmp_path / "out", Silent(), files_near=tmp_path)


def test_a_lost_connection_does_not_lose_the_result(comfy: Comfy, tmp_path: Path) -> None:
    comfy.hold = comfy.drop_socket = True
    assert queue_workflow(small_prompt(), comfy.url, tmp_path / "out", Silent())


def test_exit_codes(comfy: Comfy, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps(small_prompt()))
    arguments = ["queue", str(path), "--server", comfy.url, "--output", str(tmp_path / "out")]
    assert main([*arguments, "--set", "Magi2Sampler.seed=9"]) == 0
    assert comfy.submitted["3"]["inputs"]["seed"] == 9
    assert "a b.mp4" in capsys.readouterr().out
    comfy.ending = ("execution_error", {"node_id": "3", "exception_message": "boom"})
    comfy.sockets.clear()
    assert main(arguments) == 1
    assert "boom" in capsys.readouterr().err
    assert main(["queue", str(path), "--server", "http://127.0.0.1:9", "--output", str(tmp_path)]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_two_downloads_of_one_name_keep_both_files(tmp_path: Path) -> None:
    """Two commands may bring clips of the same name from two servers into one folder."""
    started = asyncio.Barrier(2)

    async def chunks(content: bytes) -> AsyncIterator[bytes]:
        yield content[:1]
        await started.wait()
        yield content[1:]

    async def both() -> list[Path]:
        return await asyncio.gather(*(_write(chunks(each), tmp_path / "clip.mp4") for each in (b"first", b"second")))

    paths = asyncio.run(both())
    assert [path.read_bytes() for path in paths] == [b"first", b"second"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["clip-2.mp4", "clip.mp4"]


def test_a_disk_that_is_full_is_not_the_servers_fault(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"a chunk smaller than the file's buffer"

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(RequestError, match=r"clip.mp4 cannot be written: File too large"):
            asyncio.run(_write(chunks(), tmp_path / "clip.mp4"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


def test_an_output_folder_that_goes_away_is_not_the_servers_fault(comfy: Comfy, tmp_path: Path) -> None:
    class Removing(Silent):
        def progress(self, stage: str, done: int, total: int, latent: Any = None) -> None:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)

    with pytest.raises(RequestError, match=r"^\S*a b\.mp4 cannot be written: No such file or directory\.$"):
        queue_workflow(small_prompt(), comfy.url, tmp_path / "out", Removing())


def test_a_picture_that_cannot_be_read_is_not_the_servers_fault(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"gone\.png cannot be read: No such file"):
        _read(tmp_path / "gone.png")
