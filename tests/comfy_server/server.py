"""Start and end a real ComfyUI server for tests, with the pack linked into its `custom_nodes` (60 §13)."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .stand_ins import write_stand_ins

PACK = Path(__file__).resolve().parents[2]
PACK_FOLDER = "magi2-native"


def comfyui_root() -> Path | None:
    """The ComfyUI checkout to test against: COMFYUI_ROOT, else ~/ComfyUI; None when there is none."""
    asked = os.environ.get("COMFYUI_ROOT")
    root = Path(asked) if asked else Path.home() / "ComfyUI"
    if (root / "main.py").is_file():
        return root
    if asked:
        raise FileNotFoundError(f"COMFYUI_ROOT is {asked!r}, but there is no main.py in it.")
    return None


def comfyui_python(root: Path) -> str:
    """The interpreter that has ComfyUI's dependencies: COMFYUI_PYTHON, the checkout's own environment, or ours."""
    candidates = [os.environ.get("COMFYUI_PYTHON"), root / ".venv/bin/python", root / "venv/bin/python", sys.executable]
    return next(str(path) for path in candidates if path and Path(path).is_file())


@functools.cache
def server_options(root: Path, python: str, stand_ins: Path) -> str:
    """What `main.py --help` prints: newer versions rename some options."""
    return subprocess.run(
        [python, "main.py", "--help"], cwd=root, capture_output=True, text=True, env=_environment(stand_ins)
    ).stdout


def _environment(stand_ins: Path, extra: dict[str, str] | None = None) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **(extra or {})}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{stand_ins}{os.pathsep}{inherited}" if inherited else str(stand_ins)
    return environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """One running ComfyUI. `base` holds models, input, output, user; `log` is everything it printed."""

    process: subprocess.Popen[bytes]
    port: int
    base: Path
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def request(
        self, path: str, body: Any = None, *, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, Any]:
        """Send JSON (or nothing), return the status and the decoded answer; 4xx and 5xx are answers too."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url + path, data=data, method=method, headers=headers or {})
        if data is not None and not (headers and "Content-Type" in headers):
            asked.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        with contextlib.suppress(ValueError):
            return status, json.loads(content)
        return status, content.decode(errors="replace")

    def get(self, path: str) -> Any:
        status, answer = self.request(path)
        assert status == 200, f"GET {path} answered {status}: {answer}"
        return answer

    def workers(self) -> list[psutil.Process]:
        """The live worker processes of the pool below this server."""
        try:
            return [child for child in psutil.Process(self.process.pid).children(recursive=True) if _is_worker(child)]
        except psutil.NoSuchProcess:
            return []

    def end(self) -> None:
        """SIGINT, ten seconds, SIGKILL; then no worker may be alive (60 §13)."""
        workers = self.workers()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _, alive = psutil.wait_procs(workers, timeout=5)
        assert not alive, f"workers outlived the server: {alive}"


def _is_worker(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        alive = process.status() != psutil.STATUS_ZOMBIE
        # Python's own helper that cleans up shared memory stays with the server
        return alive and "multiprocessing" in command and "resource_tracker" not in command
    except psutil.Error:
        return False


def start_server(
    base: Path,
    *,
    root: Path | None = None,
    page: Path | None = None,
    environment: dict[str, str] | None = None,
    pack: Path | None = PACK,
    wrapper: list[str] | None = None,
    ready_within_s: float = 120,
) -> Server:
    """Start ComfyUI on a free port with `base` as its base directory and return it when it answers.

    `page` is an unpacked front-end package to serve instead of the installed one. `pack` None leaves ours out.
    `wrapper` is a command that runs the server's.
    """
    root = root or comfyui_root()
    assert root is not None, "no ComfyUI checkout"
    python = comfyui_python(root)
    for name in ("custom_nodes", "models/magi2", "input", "output", "temp", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    if pack is not None and not (base / "custom_nodes" / PACK_FOLDER).exists():
        (base / "custom_nodes" / PACK_FOLDER).symlink_to(pack, target_is_directory=True)
    stand_ins = write_stand_ins(base / "stand_ins", python)
    port = free_port()
    command = [python, "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port), "--disable-auto-launch"]
    command += ["--base-directory", str(base), "--database-url", "sqlite:///:memory:"]
    no_remote = "--disable-partner-nodes"
    command.append(no_remote if no_remote in server_options(root, python, stand_ins) else "--disable-api-nodes")
    if page is not None:
        command += ["--front-end-root", str(page / "static")]
    log_path = base / f"server-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*(wrapper or []), *command],
            cwd=root,
            env=_environment(stand_ins, environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, base, log_path)
    deadline = time.monotonic() + ready_within_s
    while time.monotonic() < deadline:
        assert process.poll() is None, f"ComfyUI ended with code {process.returncode}:\n{server.log[-4000:]}"
        with contextlib.suppress(OSError):
            server.get("/prompt")
            return server
        time.sleep(0.2)
    process.kill()
    raise AssertionError(f"ComfyUI did not answer within {ready_within_s:g} s:\n{server.log[-4000:]}")


@contextlib.contextmanager
def running_server(base: Path, **options: Any) -> Iterator[Server]:
    server = start_server(base, **options)
    try:
        yield server
    finally:
        server.end()
