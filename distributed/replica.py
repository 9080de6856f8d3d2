"""The client's side of one replica: the processes of its ranks, what they say, how they end.

Used by the pool's thread only. A replica is down, starting, idle or busy. Whatever goes wrong ends in one of two ways:
every rank has ended the job at the same point and the replica goes on, or all of its processes are killed.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import wait
from typing import Any, Literal

from .agreement import StopPage
from .environment import worker_path
from .job import Job, JobCancelledError, LogLine, Memory, PoolError, Progress, RankError
from .rank import Rank, describe_exit, start_rank
from .spec import PoolSpec
from .transport import TransportError, anonymous_file

# How long the other ranks may take to end after one raised (then perhaps all did, and go on), or died (a moment, to
# hear of what happened first).
RAISED_SECONDS, DIED_SECONDS = 2.0, 0.2
logger = logging.getLogger("magi2")


class Replica:
    def __init__(self, spec: PoolSpec, index: int) -> None:
        self.index = index
        self.state: Literal["down", "starting", "idle", "busy"] = "down"
        self.job: Job | None = None
        self.ranks: list[Rank] = []
        self.start_error: PoolError | None = None
        self._spec = spec
        self.size = spec.layout.replica
        self._page: StopPage | None = None
        self._page_file = -1
        self._deadline = 0.0  # of the start, or of the stop that was asked for
        self._settled_at = 0.0  # when a failure is concluded, 0 if there is none

    # ---- start

    def start(self) -> None:
        """Start the processes and return at once; the state becomes idle, or down with `start_error`, by `advance`."""
        self.start_error = None
        self._settled_at = 0.0
        self._deadline = time.monotonic() + self._spec.start_seconds
        self._page_file = anonymous_file()
        self._page = StopPage(self._page_file, self.size)
        self.state = "starting"
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
        rank = start_rank(
            global_number, spec.devices[global_number], self._page_file, listener if number == 0 else None,
            ranks=spec.layout.world, path=worker_path(sys.path, spec.hidden_paths),
        )  # fmt: skip
        self.ranks.append(rank)
        rank.send({
            "kind": "hello", "engine": spec.engine, "plan": dict(spec.plan), "rank": number, "number": global_number,
            "layout": asdict(spec.layout), "device": rank.device,
            "port": listener.getsockname()[1] if listener else 0, "preview_seconds": spec.preview_seconds,
        })  # fmt: skip

    # ---- what the ranks say

    def files(self) -> list[Any]:
        """What to wait on: the channels and the ends of the processes."""
        return [file for rank in self.ranks if not rank.death for file in (rank.channel, rank.process.sentinel)]

    def receive(self, ready: list[Any]) -> None:
        """Take in the messages and deaths among the files that are ready."""
        for rank in self.ranks:
            if not rank.death and (rank.channel in ready or rank.process.sentinel in ready):
                self._take_messages(rank)

    def _take_messages(self, rank: Rank) -> None:
        try:
            while wait([rank.channel], 0):
                self._take(rank, rank.channel.receive())
            if not wait([rank.process.sentinel], 0):
                return
        except (EOFError, OSError, TransportError) as error:
            rank.lines.append(f"channel: {error}")
        self._bury(rank)

    def _take(self, rank: Rank, message: dict[str, Any]) -> None:
        kind, job = message["kind"], self.job
        if job is not None and message.get("job", job.number) != job.number:
            return  # of an earlier job
        if kind == "log":
            self._take_line(rank, message, job)
        elif kind == "memory":
            rank.memory = Memory(rank.number, **message["memory"])
            if job is not None:
                job.add_event(rank.memory)
        elif kind == "progress" and job is not None:
            job.add_event(Progress(**message["progress"]))
        elif kind == "ready":
            rank.ready, rank.device_name = True, message["device_name"]
        elif kind == "end":
            rank.end = message
            if message["outcome"] == "failed":
                self._note_failure(rank, message["error"]["time"], RAISED_SECONDS)

    def _take_line(self, rank: Rank, message: dict[str, Any], job: Job | None) -> None:
        level, text = message["level"], message["text"]
        rank.lines.append(f"{level} {text}")
        if message["for_user"]:
            logger.log(getattr(logging, level, logging.INFO), "[rank %d] %s", rank.number, text)
            if job is not None:
                job.add_event(LogLine(rank.number, level, text))

    def _bury(self, rank: Rank) -> None:
        rank.process.join(1)  # the sentinel may fire before the exit code is there
        rank.death = describe_exit(rank.process.exitcode)
        if not rank.raised:
            self._note_failure(rank, time.monotonic(), DIED_SECONDS)

    def _note_failure(self, rank: Rank, when: float, patience: float) -> None:
        rank.failed_at = when
        self._settled_at = min(self._settled_at or math.inf, time.monotonic() + patience)
        if self.job is not None and self._page is not None:
            self._page.request_stop(self.job.number)

    # ---- jobs

    def run(self, job: Job) -> None:
        """Give the idle ranks a job."""
        assert self._page is not None
        self.state, self.job, self._settled_at, self._deadline = "busy", job, 0.0, 0.0
        self._page.reset()
        for rank in self.ranks:
            rank.end = None
            rank.send(job.message)
        job.message.close()

    def advance(self) -> None:
        """Do what is due: conclude a start or a job, pass on a cancel, enforce the deadlines."""
        now = time.monotonic()
        if self.state == "starting":
            self._advance_start(now)
        elif self.state == "busy":
            self._advance_job(now)
        elif self.state == "idle" and any(rank.death for rank in self.ranks):
            dead = next(rank for rank in self.ranks if rank.death)
            logger.warning("%s %s while idle; the next run starts new workers.", dead.name, dead.death)
            self.kill()

    def _advance_start(self, now: float) -> None:
        failed = [rank for rank in self.ranks if rank.failed]
        if failed:
            if all(rank.ready or rank.failed for rank in self.ranks) or now > self._settled_at:
                self.start_error = self._error("while starting")
                self.kill()
        elif all(rank.ready for rank in self.ranks):
            self.state = "idle"
        elif now > self._deadline:
            missing = [rank for rank in self.ranks if not rank.ready]
            late = f"did not report within {self._spec.start_seconds:g} s of the start"
            self.start_error = self._stuck_error(missing, late)
            self.kill()

    def _advance_job(self, now: float) -> None:
        job = self.job
        assert job is not None
        assert self._page is not None
        if all(rank.end or rank.death for rank in self.ranks) or (self._settled_at and now > self._settled_at):
            self._conclude(job)
        elif job.cancels and not self._deadline:
            self._page.request_stop(job.number)
            self._deadline = now + self._spec.grace_seconds
        elif self._deadline and not self._settled_at and (now > self._deadline or job.cancels > 1):
            error = self._stuck_error(
                [rank for rank in self.ranks if not rank.end],
                "did not stop before the second cancel" if job.cancels > 1
                else f"did not stop within {self._spec.grace_seconds:g} s of the cancel",
            )  # fmt: skip
            logger.warning("%s", error)
            self.kill()
            self._finish(job, JobCancelledError(f"The job was cancelled. {error.sentence}"))

    def _conclude(self, job: Job) -> None:
        """All ranks have ended or died, or the others had their time after a failure."""
        where = f"in '{job.call}'"
        ends = [rank.end for rank in self.ranks if rank.end is not None and not rank.death]
        complete = len(ends) == len(self.ranks)
        # A rank that returned without a check point took no part and has nothing under way, see worker.Engine.
        part = [end for end in ends if end["checks"] or end["outcome"] != "done"]
        ways = {(end["outcome"], end["checks"], end["error"] and end["error"]["message"]) for end in part}
        outcomes = {end["outcome"] for end in part}
        error: PoolError | None = None
        if complete and outcomes <= {"done"}:
            usable = True
            if len(ways) > 1:
                logger.error("%s", self._uneven(where))
        else:
            usable = complete and len(ways) == 1 and all(end["usable"] for end in part)
            cancelled = usable and outcomes == {"stopped"}
            error = JobCancelledError("The job was cancelled.") if cancelled else self._error(where, survived=usable)
        if usable:
            self.state = "idle"
        else:
            self.kill()
        self._finish(job, error, ends[0]["result"] if error is None else None)

    def _finish(self, job: Job, error: PoolError | None, result: dict[str, Any] | None = None) -> None:
        self.job = None
        for rank in self.ranks:
            rank.end = None  # it holds the result
        job.finish(result, error)

    # ---- errors

    def _error(self, when: str, *, survived: bool = False) -> RankError:
        """The one error of a failed start or job: its root cause, not what it caused in other ranks."""
        failed = sorted((rank for rank in self.ranks if rank.failed), key=lambda rank: rank.failed_at)
        if not failed:
            return RankError(self._uneven(when), rank=self.ranks[0].number)
        # A rank that dies breaks the others' connections, and their errors may be heard of first.
        dead = [rank for rank in failed if not rank.raised and rank.failed_at < failed[0].failed_at + 0.5]
        rank = (dead or failed)[0]
        lines, error = tuple(rank.lines), rank.raised
        if error is None:
            sentence = f"{rank.name} {rank.death} {when}."
            return RankError(sentence, rank=rank.number, log_lines=lines, traceback=rank.crash_report())
        return RankError(
            f"{rank.name} raised {error['type']} {when}: {error['message']}", rank=rank.number,
            error_type=error["type"], message=error["message"], survived=survived, log_lines=lines,
            traceback=error["traceback"],
        )  # fmt: skip

    def _uneven(self, when: str) -> str:
        counts = ", ".join(f"rank {rank.number}: {rank.end['checks']}" for rank in self.ranks if rank.end)
        return (
            f"The ranks passed different numbers of check points {when} ({counts}), so they could not have been "
            "stopped together; the engine must call events.check() equally often on every rank."
        )

    def _stuck_error(self, ranks: list[Rank], what: str) -> RankError:
        """An error about ranks that hang, with the place where the first one does."""
        first = ranks[0]
        names = ", ".join(rank.name for rank in ranks)
        return RankError(
            f"{names} {what}.", rank=first.number, log_lines=tuple(first.lines), traceback=first.stack_report()
        )

    # ---- end

    def quit(self) -> None:
        """End the workers in an orderly way: 3 s for that, 2 s after SIGTERM, then SIGKILL."""
        if self.job is not None and self._page is not None:
            self._page.request_stop(self.job.number)
        for rank in self.ranks:
            rank.send({"kind": "quit"})
        self._join(3)
        for rank in self.ranks:
            rank.process.terminate()
        self._join(2)
        self.kill()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """End all processes at once and forget them."""
        for rank in self.ranks:
            rank.process.kill()
        self._join(5)
        for rank in self.ranks:
            if rank.process.exitcode is None:
                logger.warning("%s does not end although it was killed: it is inside a system call.", rank.name)
            rank.close()
        self.ranks = []
        if self._page is not None:
            self._page = None
            os.close(self._page_file)
        self.state = "down"

    def status(self) -> dict[str, Any]:
        """Plain values for a status panel; may be called from any thread."""
        job = self.job
        return {
            "replica": self.index,
            "state": self.state,
            "job": None if job is None else {"number": job.number, "call": job.call},
            "ranks": [rank.status() for rank in list(self.ranks)],
        }


def _loopback_listener() -> socket.socket:
    """A listening socket on a free port of 127.0.0.1: rank 0 serves the rendezvous on it (80 §30)."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    return listener
