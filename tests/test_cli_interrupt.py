"""Ctrl-C and SIGTERM on the real command, while it samples: it ends in seconds and leaves no file and no process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

# The command in a process of its own, but for the size of the clip: a step of a real one would take a minute here.
SMALL = """
import sys
from magi2_native.headless.cli import main
from magi2_native.magi2_core.sampling import geometry
geometry.TIERS["272p"] = geometry.Tier((64, 32))
sys.exit(main())
"""
PATIENCE = 120.0  # for a start on a busy machine


class Command:
    """`magi2 generate` with far too many steps, in a session of its own, as a terminal would start it."""

    def __init__(self, checkpoint: Path, output: Path, workers: int) -> None:
        arguments = ["generate", str(checkpoint), "--prompt", "A boat", "--output", str(output), "--device", "cpu",
                     "--workers", str(workers), "--resolution", "272p", "--steps", "900", "--json"]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", SMALL, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.timer = threading.Timer(PATIENCE, self.kill)
        self.timer.start()

    def wait_until_sampling(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("stage") == "sample" and event["done"] > 1:
                return
        pytest.fail(f"it ended before it sampled: {self.process.communicate()[1]}")

    def end(self) -> tuple[int, dict[str, str], str, float]:
        """Exit code, the last line, everything on stderr, and the seconds that it took."""
        started = time.monotonic()
        out, err = self.process.communicate()
        return self.process.returncode, json.loads(out.splitlines()[-1]), err, time.monotonic() - started

    def survivors(self) -> list[int]:
        """Processes of the command's session, workers included."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            except OSError:
                continue
            if fields and int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.name))
        return found

    def kill(self) -> None:
        self.timer.cancel()
        for process in self.survivors():
            os.kill(process, signal.SIGKILL)
        self.process.wait()


def to_the_command(command: Command, number: signal.Signals) -> None:
    os.kill(command.process.pid, number)


def to_the_terminal(command: Command, number: signal.Signals) -> None:
    """As a terminal sends Ctrl-C: to the command and to its workers."""
    os.killpg(command.process.pid, number)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
@pytest.mark.parametrize(
    ("workers", "send", "number", "code", "sentence"),
    [
        (1, to_the_terminal, signal.SIGINT, 130, "Interrupted; nothing was written."),
        (2, to_the_terminal, signal.SIGINT, 130, "Interrupted; nothing was written."),
        (2, to_the_command, signal.SIGTERM, 143, "Ended by SIGTERM; nothing was written."),
    ],
    ids=["Ctrl-C", "Ctrl-C-two-workers", "SIGTERM-two-workers"],
)
def test_a_signal_while_sampling_ends_the_command_and_its_workers(
    tiny: Path, tmp_path: Path, workers: int, send: Callable[[Command, signal.Signals], None], number: signal.Signals,
    code: int, sentence: str,
) -> None:  # fmt: skip
    command = Command(tiny, tmp_path / "clip.mp4", workers)
    try:
        command.wait_until_sampling()
        assert len(command.survivors()) >= workers
        send(command, number)
        ended, last, stderr, seconds = command.end()
        assert ended == code
        assert last == {"event": "error", "text": sentence}
        assert "Traceback" not in stderr
        assert seconds < 10
        # the tracker of multiprocessing ends by itself once it sees the command gone (80 §5 allows five seconds)
        deadline = time.monotonic() + 5
        while command.survivors() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert command.survivors() == []
        assert list(tmp_path.iterdir()) == []
    finally:
        command.kill()


# A first import that takes long, at which the Ctrl-C comes.
SLOW = """
import builtins, signal, sys
real = builtins.__import__
def slow(name, *rest):
    if name == "torch":
        signal.raise_signal(signal.SIGINT)
    return real(name, *rest)
builtins.__import__ = slow
from magi2_native.headless.cli import main
sys.exit(main())
"""


def test_ctrl_c_while_the_command_imports_its_parts_is_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SLOW, "inspect", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted; nothing was written.\n")
