"""A replica whose ranks are processes of this host, children of the client."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from dataclasses import asdict
from typing import Any

from .agreement import StopPage
from .environment import worker_path
from .job import PoolError
from .process import Worker, describe_exit, start_worker
from .replica import DIED_SECONDS, Replica
from .spec import PoolSpec
from .transport import Packed, anonymous_file
from .tree import TransportError

logger = logging.getLogger("magi2")


class LocalReplica(Replica):
    def __init__(self, spec: PoolSpec, index: int) -> None:
        super().__init__(spec, index)
        self.ranks: list[Worker] = []
        self._page: StopPage | None = None
        self._page_file = -1

    def start(self) -> None:
        super().start()
        self._page_file = anonymous_file()
        self._page = StopPage(self._page_file, self.size)
        listener = _loopback_listener() if self.size > 1 else None
        try:
            for number in range(self.size):
                self._start_rank(number, listener)
        except OSError as error:
            self.kill()
            self.start_error = PoolError(f"A worker process could not be started: {error}.")
        finally:
            if listener is not None:
                listener.close()

    def _start_rank(self, number: int, listener: socket.socket | None) -> None:
        spec = self._spec
        global_number = self.index * self.size + number
        worker = start_worker(
            global_number, spec.devices[global_number], self._page_file, listener if number == 0 else None,
            ranks=spec.layout.world, path=worker_path(sys.path, spec.hidden_paths),
        )  # fmt: skip
        self.ranks.append(worker)
        port = listener.getsockname()[1] if listener else 0
        worker.send({
            "kind": "hello", "engine": spec.engine, "plan": dict(spec.plan), "layout": asdict(spec.layout),
            "rank": number, "number": global_number, "device": worker.device, "port": port,
            "preview_seconds": spec.preview_seconds,
        })  # fmt: skip

    def files(self) -> list[Any]:
        """The channels and the ends of the processes."""
        return [file for worker in self.ranks if not worker.death for file in (worker.channel, worker.process.sentinel)]

    def receive(self, ready: list[Any]) -> None:
        for worker in self.ranks:
            if not worker.death and (worker.channel in ready or worker.process.sentinel in ready):
                self._take_messages(worker, worker.process.sentinel in ready)

    def _take_messages(self, worker: Worker, ended: bool) -> None:
        """Take in what a worker said, to the end of its channel if its process has ended."""
        try:
            while worker.channel.ready():
                self._take(worker, worker.channel.receive())
            if not ended:
                return
        except (EOFError, OSError, TransportError) as error:
            worker.lines.append(f"channel: {error}")
        worker.process.join(1)  # the sentinel may fire before the exit code is there
        worker.death = describe_exit(worker.process.exitcode)
        if not worker.raised:
            self._note_failure(worker, time.monotonic(), DIED_SECONDS)

    def _hand_out(self, message: Packed) -> None:
        assert self._page is not None
        self._page.reset()
        for worker in self.ranks:
            worker.send(message)

    def _ask_to_stop(self, job: int) -> None:
        if self._page is not None:
            self._page.request_stop(job)

    # ---- end

    def ask_to_quit(self) -> None:
        if self.job is not None:
            self._ask_to_stop(self.job.number)
        for worker in self.ranks:
            worker.send({"kind": "quit"})

    def quit(self) -> None:
        """3 s for an orderly end, 2 s after SIGTERM, then SIGKILL (60 §6.5)."""
        self._join(3)
        for worker in self.ranks:
            worker.process.terminate()
        self._join(2)
        self.kill()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in self.ranks:
            worker.process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for worker in self.ranks:
            worker.process.kill()
        self._join(5)
        for worker in self.ranks:
            if worker.process.exitcode is None:
                logger.warning("%s does not end although it was killed: it is inside a system call.", worker.name)
            worker.close()
        self.ranks = []
        if self._page is not None:
            self._page = None
            os.close(self._page_file)
        self.state = "down"

    def let_go(self) -> None:
        for worker in self.ranks:
            worker.life.close()


def _loopback_listener() -> socket.socket:
    """A listening socket on a free port of 127.0.0.1: rank 0 serves the rendezvous on it (80 §30)."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener
