"""One worker process of this host: starting it, its open files, and what its end says."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

from . import spawn
from .rank import Rank
from .transport import Channel, anonymous_file

_CHANNEL_SECONDS = 10.0  # for the rest of a message whose first bytes are there
_CRASH_BYTES = 1 << 16
_BOOTSTRAP = Path(__file__).resolve().with_name("bootstrap.py")
_ROOT = _BOOTSTRAP.parents[1]


@dataclass(kw_only=True)
class Worker(Rank):
    """A rank that is a child of this process."""

    process: BaseProcess
    channel: Channel
    life: Connection  # the only write end of the pipe whose closing ends the child
    crash: int

    def crash_report(self) -> str:
        return os.pread(self.crash, _CRASH_BYTES, 0).decode(errors="replace").strip()

    def stack_report(self) -> str:
        """Where the process stands, for one that hangs: it writes its stack when told, see worker.py."""
        if self.ready:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return self.crash_report()

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it died; its sentinel tells so, with the cause
            self.channel.send(message)

    def close(self) -> None:
        self.channel.close()
        self.life.close()
        os.close(self.crash)


def start_worker(
    number: int, device: str, page: int, listener: socket.socket | None, *, ranks: int, path: list[str]
) -> Worker:
    """Start the process of rank `number` of `ranks` on this host; returns at once. Raises OSError.

    page: the replica's page of `agreement`; listener: where rank 0 serves the rendezvous; path: sys.path of the worker.
    What the process is given is plain values and open files only: it cannot import our classes yet (60 §6.2).
    """
    ours, theirs = socket.socketpair()
    life_theirs, life_ours = torch.multiprocessing.Pipe(duplex=False)
    crash = anonymous_file()
    files: dict[str, Connection | None] = {
        "channel": Connection(os.dup(theirs.fileno())),
        "life": life_theirs,
        "page": Connection(os.dup(page)),
        "crash": Connection(os.dup(crash)),
        "listener": Connection(os.dup(listener.fileno())) if listener else None,
    }
    arguments = {"root": str(_ROOT), "parent": os.getpid(), "ranks": ranks, **files}
    process = torch.multiprocessing.get_context("spawn").Process(
        target=runpy.run_path, args=(str(_BOOTSTRAP), {"arguments": arguments}, "magi2_bootstrap"),
        daemon=True, name=f"magi2-rank{number}",
    )  # fmt: skip
    ours.settimeout(_CHANNEL_SECONDS)
    worker = Worker(number, device, process=process, channel=Channel(ours), life=life_ours, crash=crash)
    try:
        spawn.start(process, path)
    except BaseException:
        worker.close()
        raise
    finally:
        theirs.close()
        for file in files.values():  # above all our copy of the read end of the life pipe
            if file is not None:
                file.close()
    worker.pid = process.pid or 0
    return worker


def describe_exit(code: int | None) -> str:
    """What an exit code of a process says, as the predicate of a sentence."""
    if code is None:
        return "closed its channel"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (the kernel's out-of-memory killer does that; see dmesg)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
