"""A real HTTP server on this machine that answers chat completions the way a test scripts it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Step = Callable[["Handler"], None]

LONG = 60.0  # seconds that a server goes on for if nobody stops it; a test that waits for this long has failed


class Handler(BaseHTTPRequestHandler):
    """One request: the next scripted step answers it; the last one answers all further requests."""

    protocol_version = "HTTP/1.1"
    server: CaptionServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        step = self.server.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
        try:
            step(self)
        except (BrokenPipeError, ConnectionResetError):
            self.server.hung_up.set()

    def send(self, status: int, body: Any, **headers: str) -> None:
        """Answer with a JSON body in one piece."""
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_events(self, events: Iterable[Any], pause: float = 0.0, finish: bool = True) -> None:
        """Answer with a stream of events; without `finish` the connection is cut before the end."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            self._chunk(f"data: {json.dumps(event)}\n\n")
            time.sleep(pause)
        if finish:
            self._chunk("data: [DONE]\n\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


class CaptionServer(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1 between `with` and its end, and remembers what it was sent.

    hung_up: set when a client closed its connection before its answer was complete. over: set at the end of `with`.
    """

    daemon_threads = True

    def __init__(self, *steps: Step) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.steps = list(steps)
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.requests: list[dict[str, Any]] = []
        self.hung_up = threading.Event()
        self.over = threading.Event()
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def take(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Step:
        with self._lock:
            self.paths.append(path)
            self.headers.append(headers)
            self.requests.append(body)
            return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


def pieces(text: str, count: int = 4) -> list[str]:
    size = max(1, -(-len(text) // count))
    return [text[at : at + size] for at in range(0, len(text), size)] or [""]


def streamed(text: str, *, pause: float = 0.0, reason: str = "stop", finish: bool = True) -> Step:
    """The answer in pieces, as endpoints stream it."""
    events: list[Any] = [_event({"role": "assistant"})]
    events += [_event({"content": piece}) for piece in pieces(text)]
    if finish:
        events += [_event({}, reason), {"id": "x", "object": "chat.completion.chunk", "model": "m", "created": 0,
                                        "choices": [], "usage": None}]  # fmt: skip
    return lambda handler: handler.send_events(events, pause, finish)


def whole(text: str | None, reason: str = "stop") -> Step:
    """The answer of an endpoint that does not stream."""
    message = {"role": "assistant", "content": text}
    body = {"id": "x", "object": "chat.completion", "choices": [{"message": message, "finish_reason": reason}]}
    return lambda handler: handler.send(200, body)


def refused(status: int, message: str, **headers: str) -> Step:
    """An error; `retry-after-ms` keeps the client's waiting short."""
    body = {"error": {"message": message, "type": "error"}}
    return lambda handler: handler.send(status, body, retry_after_ms="20", **headers)


def silent(handler: Handler) -> None:
    """No answer as long as the server is up."""
    handler.server.over.wait(LONG)
    handler.close_connection = True


def endless(event: Any) -> Step:
    """A stream of one event, twenty times a second, that ends with its client or with the server."""

    def answer(handler: Handler) -> None:
        ends = time.monotonic() + LONG
        running = iter(lambda: time.monotonic() < ends and not handler.server.over.is_set(), False)
        handler.send_events((event for _ in running), 0.05)

    return answer


def calls_ended(seconds: float = 10.0) -> bool:
    """Whether no thread talks to an endpoint any more, or none does within that time."""
    calls = [thread for thread in threading.enumerate() if thread.name == "magi2-enhance"]
    for call in calls:
        call.join(seconds)
    return not any(call.is_alive() for call in calls)


def _event(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
