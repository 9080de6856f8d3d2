"""`magi2 queue`: run an API workflow on a ComfyUI server and bring the results home (60 §10)."""

from __future__ import annotations

import asyncio
import contextlib
import filecmp
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..magi2_core.errors import MissingDependencyError, RequestError
from ..magi2_core.events import Events
from .files import output_folder, unused
from .workflow import Workflow, check_links, title

# inputs that name a file: a local file of that name is uploaded first
FILE_INPUTS = {("LoadImage", "image"), ("LoadAudio", "audio"), ("LoadVideo", "file"), ("Magi2LoadLatent", "latent")}
UPLOAD_FOLDER = "magi2_uploads"  # not the name of the latents' folder: one in the output folder would be loaded
READ_SECONDS = 60.0  # without a byte of an answer
SILENT_SECONDS = 10.0  # without a message about a prompt, before the server is asked for it
WITHDRAW_SECONDS = 5.0


def queue_workflow(
    workflow: Workflow, server: str, output: Path, events: Events, on_file: Callable[[Path], None] = lambda path: None,
    *, files_near: Path | None = None, new_inputs: Iterable[tuple[str, str]] = (),
) -> list[Path]:  # fmt: skip
    """Upload inputs, submit, show progress, download what was saved; return the files.

    `on_file` hears of each file as soon as it is there. `files_near` is a folder in which input files are looked for
    besides the current one. `new_inputs` are (node, input) that `set_inputs` added. Ctrl-C interrupts the prompt on the
    server. Raises RequestError with the server's words for everything that goes wrong.
    """
    try:
        import aiohttp
    except ImportError as error:
        raise MissingDependencyError("`magi2 queue` needs the package aiohttp: pip install aiohttp.") from error
    base = server.rstrip("/")
    if "://" not in base:
        base = f"http://{base}"
    check_links(workflow)  # the server has no words for it
    try:
        with output_folder(output):
            return asyncio.run(_queue(aiohttp, workflow, base, output, events, on_file, files_near, new_inputs))
    except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:  # another OSError is of this machine
        raise RequestError(f"The server {base} does not answer as ComfyUI does: {error}.") from error


async def _queue(
    aiohttp: Any, workflow: Workflow, base: str, output: Path, events: Events, on_file: Callable[[Path], None],
    files_near: Path | None, new_inputs: Iterable[tuple[str, str]],
) -> list[Path]:  # fmt: skip
    client_id, prompt_id = uuid.uuid4().hex, str(uuid.uuid4())
    timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=READ_SECONDS)
    closing = aiohttp.ClientWSTimeout(ws_close=1)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await _check_new_inputs(session, workflow, base, new_inputs)
        await _upload_inputs(aiohttp, session, workflow, base, files_near, events)
        # listen before submitting, so that no message is missed
        async with session.ws_connect(
            f"{base}/ws?clientId={client_id}", max_msg_size=0, heartbeat=60, timeout=closing
        ) as socket:
            try:
                answer = await _submit(session, workflow, base, client_id, prompt_id)
                prompt_id = str(answer.get("prompt_id", prompt_id))
                _check_accepted(answer, workflow)
                await _tell_place(session, base, prompt_id, events)
                await _follow(aiohttp, session, socket, workflow, base, prompt_id, events)
                while not await _recorded(session, base, prompt_id):  # the connection was lost before the end
                    await asyncio.sleep(0.3)
            except BaseException:
                try:
                    async with asyncio.timeout(WITHDRAW_SECONDS):
                        await _withdraw(session, base, prompt_id)
                except (aiohttp.ClientError, TimeoutError):
                    events.log("The server does not answer; the prompt may still run there.")
                raise
        return await _download(session, base, prompt_id, output, events, on_file)


async def _check_new_inputs(session: Any, workflow: Workflow, base: str, inputs: Iterable[tuple[str, str]]) -> None:
    """RequestError for an input that was set and that the node does not have: the server would pass over it."""
    for node_id, name in inputs:
        kind = workflow[node_id]["class_type"]
        async with session.get(f"{base}/object_info/{quote(kind)}") as answer:
            info = (await answer.json()).get(kind)
        known = [each for part in ("required", "optional") for each in (info or {}).get("input", {}).get(part, {})]
        if info and name not in known:
            raise RequestError(f"{kind} (node {node_id}) has no input {name}; it has {', '.join(known)}.")


async def _upload_inputs(
    aiohttp: Any, session: Any, workflow: Workflow, base: str, near: Path | None, events: Events
) -> None:
    for node in workflow.values():
        for name, value in node["inputs"].items():
            if (node["class_type"], name) not in FILE_INPUTS or not isinstance(value, str):
                continue
            # not Path.is_file: it raises for a name that is too long
            found = next((path for folder in (Path(), near) if folder and os.path.isfile(path := folder / value)), None)
            if found is None:
                events.log(f"There is no file {value} here to upload; the server must have it.")
                continue
            form = aiohttp.FormData()
            form.add_field("image", _read(found), filename=found.name)
            form.add_field("type", "input")
            form.add_field("subfolder", UPLOAD_FOLDER)
            async with session.post(f"{base}/upload/image", data=form) as answer:
                if answer.status != 200:
                    raise RequestError(f"The server refused {found}: {(await answer.text())[:300]}")
                stored = await answer.json()
            node["inputs"][name] = "/".join(filter(None, (stored["subfolder"], stored["name"])))
            events.log(f"Uploaded {found.name}.")


async def _submit(session: Any, workflow: Workflow, base: str, client_id: str, prompt_id: str) -> dict[str, Any]:
    # 60 §10: with an id of ours a prompt can be withdrawn before the answer has come
    body = {"prompt": workflow, "client_id": client_id, "prompt_id": prompt_id}
    async with session.post(f"{base}/prompt", json=body) as answer:
        content = await answer.json(content_type=None)
    if not isinstance(content, dict):  # from what stands before ComfyUI
        raise RequestError(f"The server refused the workflow: {answer.status} {answer.reason}.")
    return content


def _check_accepted(answer: dict[str, Any], workflow: Workflow) -> None:
    # 60 §9: with at least one valid output the server answers 200, reports the rest and runs only a part
    problems = _node_errors(answer.get("node_errors") or {}, workflow)
    if problems or "prompt_id" not in answer:
        error = answer.get("error") or {}
        text = error.get("message", "") if isinstance(error, dict) else str(error)
        raise RequestError("\n".join(["The server refused the workflow: " + text, *problems]))


async def _tell_place(session: Any, base: str, prompt_id: str, events: Events) -> None:
    waiting = await _waiting(session, base)
    if ahead := sum(number < waiting.get(prompt_id, 0) for number in waiting.values()):
        events.log(f"Queued; {ahead} before it.")


def _node_errors(node_errors: dict[str, Any], workflow: Workflow) -> list[str]:
    lines = []
    for node_id, entry in node_errors.items():
        name = entry.get("class_type") or workflow.get(node_id, {}).get("class_type", "?")
        lines += [f"  node {node_id} ({name}): {_words(error)}" for error in entry.get("errors", [])]
    return list(dict.fromkeys(lines))


def _words(error: dict[str, Any]) -> str:
    message, details = str(error.get("message") or ""), str(error.get("details") or "")
    if error.get("type") == "custom_validation_failed":  # said of the node, and repeated for each of its inputs
        return details.partition(" - ")[2] or details
    return ": ".join(filter(None, (message, details)))


async def _follow(
    aiohttp: Any, session: Any, socket: Any, workflow: Workflow, base: str, prompt_id: str, events: Events
) -> None:
    """Pass progress on until the prompt or the connection has ended; RequestError if it failed."""
    closed = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED)
    while True:
        events.check()
        try:
            message = await socket.receive(timeout=SILENT_SECONDS)
        except TimeoutError:
            content: dict[str, Any] = {"type": "status"}
        else:
            if message.type in closed:
                return
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            content = json.loads(message.data)
        data = content.get("data") or {}
        if data.get("prompt_id") not in (None, prompt_id):
            continue
        match content.get("type"):
            case "status":  # all that is said of a prompt that was taken from the queue
                if await _recorded(session, base, prompt_id):
                    return
            case "executing" if data.get("node"):
                events.log(_title(workflow, data["node"]))
            case "executing" if data.get("prompt_id") == prompt_id:
                return
            case "progress":
                node = _title(workflow, data.get("node"))
                events.progress(node, int(data["value"]), int(data["max"]))
            case "execution_error":
                raise RequestError(f"{_title(workflow, data.get('node_id'))} failed: {data.get('exception_message')}")
            case "execution_interrupted":
                raise RequestError("The prompt was interrupted on the server.")
            case "execution_success":
                return


async def _recorded(session: Any, base: str, prompt_id: str) -> bool:
    """Whether the history has the prompt; False while it waits or runs, RequestError if the server has it nowhere."""
    if prompt_id in await _waiting(session, base):
        return False
    if await _history(session, base, prompt_id) is None:
        raise RequestError("The server has lost the prompt; it was restarted or its queue was cleared.")
    return True


async def _waiting(session: Any, base: str) -> dict[str, float]:
    """The prompts that run or wait, and their numbers: the smallest comes first."""
    async with session.get(f"{base}/queue") as answer:
        queue = await answer.json()
    return {entry[1]: entry[0] for entry in (*queue["queue_running"], *queue["queue_pending"])}


async def _history(session: Any, base: str, prompt_id: str) -> Any:
    async with session.get(f"{base}/history/{prompt_id}") as answer:
        return (await answer.json()).get(prompt_id)


def _title(workflow: Workflow, node_id: str | None) -> str:
    node = workflow.get(str(node_id), {})
    return str(title(node) or node.get("class_type") or node_id)


async def _withdraw(session: Any, base: str, prompt_id: str) -> None:
    """Take a prompt back, whether it waits or runs (60 §4)."""
    async with session.post(f"{base}/queue", json={"delete": [prompt_id]}):
        pass
    async with session.post(f"{base}/interrupt", json={"prompt_id": prompt_id}):
        pass


async def _download(
    session: Any, base: str, prompt_id: str, output: Path, events: Events, on_file: Callable[[Path], None]
) -> list[Path]:
    entry = await _history(session, base, prompt_id)
    if entry is None:
        raise RequestError("The server has no record of the prompt; its history may have been cleared.")
    status = entry.get("status") or {}
    for kind, data in status.get("messages", []):
        if kind == "execution_error":
            raise RequestError(f"{data.get('node_type')} failed: {data.get('exception_message')}")
        if kind == "execution_interrupted":
            raise RequestError("The prompt was interrupted on the server.")
    written = []
    for found in saved_files(entry.get("outputs") or {}):
        query = "&".join(f"{key}={quote(str(found.get(key, '')))}" for key in ("filename", "subfolder", "type"))
        target = output / Path(found["filename"]).name
        async with session.get(f"{base}/view?{query}") as answer:
            if answer.status != 200:
                raise RequestError(f"The server does not hand out {found['filename']} (status {answer.status}).")
            target = await _write(answer.content.iter_chunked(1 << 20), target)
        written.append(target)
        on_file(target)
    if not written:
        events.log("The workflow saved no file.")
    return written


def saved_files(outputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Every file that the nodes saved for good: entries of any kind with a file name and the type output."""
    return [
        entry
        for node in outputs.values()
        for entries in node.values()
        if isinstance(entries, list)
        for entry in entries
        if isinstance(entry, dict) and entry.get("type") == "output" and "filename" in entry
    ]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror or error}.") from error


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """RequestError for what the disk of this machine refuses."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"{target} cannot be written: {error.strerror or error}.") from error


async def _write(chunks: Any, target: Path) -> Path:
    """Write a download and return where it is: under another name if something else has this one.

    It gets a temporary name first, so that a broken download leaves nothing under the final one.
    """
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with _writing(target):
            file = part.open("xb", buffering=0)
        with file:
            async for chunk in chunks:
                rest = memoryview(chunk)
                with _writing(target):
                    while rest:
                        rest = rest[file.write(rest) :]
        with _writing(target):
            while not target.exists() or not filecmp.cmp(part, target, shallow=False):
                target = unused(target)
                with contextlib.suppress(FileExistsError):  # another download may have taken the name meanwhile
                    target.touch(exist_ok=False)
                    part.replace(target)
                    break
    finally:
        part.unlink(missing_ok=True)
    return target
