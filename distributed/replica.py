"""The client's side of one replica: what its ranks are doing, what they say, and what follows from how they end.

Used by the pool's thread only. A replica is down, starting, idle or busy. Whatever goes wrong ends in one of two ways:
every rank has ended the job at the same point and the replica goes on, or all of its ranks are ended.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from typing import Any, Literal

from .job import Job, JobCancelledError, LogLine, Memory, PoolError, Progress, RankError
from .rank import Rank
from .spec import PoolSpec
from .transport import Packed

# How long the other ranks may take to end after one raised (then perhaps all did, and go on), or died (a moment, to
# hear of what happened first).
RAISED_SECONDS, DIED_SECONDS = 2.0, 0.2
logger = logging.getLogger("magi2")


class Replica:
    """The course of starts and jobs; how messages reach the ranks is for the subclasses (local.py, remote.py)."""

    def __init__(self, spec: PoolSpec, index: int) -> None:
        self.index = index
        self.size = spec.layout.replica
        self.state: Literal["down", "starting", "idle", "busy"] = "down"
        self.job: Job | None = None
        self.ranks: Sequence[Rank] = ()
        self.start_error: PoolError | None = None
        self._spec = spec
        self._deadline = 0.0  # of the start, or of the stop that was asked for
        self._settled_at = 0.0  # when a failure is concluded, 0 if there is none

    def start(self) -> None:
        """Begin to start and return at once; `advance` makes the state idle, or down with a `start_error`."""
        self.start_error, self.state, self._settled_at = None, "starting", 0.0
        self._deadline = time.monotonic() + self._spec.start_seconds

    def files(self) -> list[Any]:
        """What the pool's thread waits on."""
        raise NotImplementedError

    def receive(self, ready: list[Any]) -> None:
        """Take in what is there on the files that are ready."""
        raise NotImplementedError

    def ask_to_quit(self) -> None:
        """Ask the ranks to end, and the current job to stop before."""
        raise NotImplementedError

    def quit(self) -> None:
        """Wait a while for the ranks to end after `ask_to_quit`, then `kill`."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the ranks at once and forget them; the state becomes down."""
        raise NotImplementedError

    def let_go(self) -> None:
        """In a forked copy of this process: close whatever keeps ranks alive."""

    def _hand_out(self, message: Packed) -> None:
        """Send a job to the idle ranks."""
        raise NotImplementedError

    def _ask_to_stop(self, job: int) -> None:
        """Have the ranks stop `job` at their next common check point."""
        raise NotImplementedError

    # ---- what the ranks say

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
            rank.device, rank.pid = message["device"], message["pid"]
        elif kind == "end":
            rank.end = message
            if message["outcome"] == "failed":
                self._note_failure(rank, message["error"]["time"], RAISED_SECONDS)

    def _take_line(self, rank: Rank, message: dict[str, Any], job: Job | None) -> None:
        level, text = message["level"], message["text"]
        rank.lines.append(f"{level} {text}")
        if not message["for_user"]:
            return
        # once: to whoever runs the job, who may log it too, and while there is none to the log
        if job is not None:
            job.add_event(LogLine(rank.number, level, text))
        else:
            logger.log(getattr(logging, level, logging.INFO), "[rank %d] %s", rank.number, text)

    def _note_failure(self, rank: Rank, when: float, patience: float) -> None:
        rank.failed_at = when
        self._settled_at = min(self._settled_at or math.inf, time.monotonic() + patience)
        if self.job is not None:
            self._ask_to_stop(self.job.number)

    # ---- jobs

    def run(self, job: Job) -> None:
        """Give the idle ranks a job."""
        self.state, self.job, self._settled_at, self._deadline = "busy", job, 0.0, 0.0
        for rank in self.ranks:
            rank.end = None
        self._hand_out(job.message)
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
        if all(rank.end or rank.death for rank in self.ranks) or (self._settled_at and now > self._settled_at):
            self._conclude(job)
        elif job.cancels and not self._deadline:
            self._ask_to_stop(job.number)
            self._deadline = now + self._spec.grace_seconds
        elif self._deadline and not self._settled_at and (now > self._deadline or job.cancels > 1):
            error = self._stuck_error(
                [rank for rank in self.ranks if not rank.end],
                "did not stop before the second cancel" if job.cancels > 1
                else f"did not stop within {self._spec.grace_seconds:g} s of the cancel",
            )  # fmt: skip
            logger.warning("%s", error.sentence)
            if job.cancels == 1:  # where a rank hangs matters after a while of patience, not to somebody who had none
                logger.info("%s", error)
            self.kill()
            self._finish(job, JobCancelledError(f"The job was cancelled. {error.sentence}"))

    def _conclude(self, job: Job) -> None:
        """All ranks have ended or died, or the others had their time after a failure."""
        where = f"in '{job.call}'"
        ends = [rank.end for rank in self.ranks if rank.end is not None and not rank.death]
        complete = len(ends) == len(self.ranks)
        # A rank that returned without a check point took no part and has nothing under way, see worker.Engine.
        part = [end for end in ends if end["checks"] or end["outcome"] != "done"]
        # One text, because equal types alone do not prove one place: ranks that ran out of memory before and after a
        # collective are no longer in step.
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

    def status(self) -> dict[str, Any]:
        """Plain values for a status panel; may be called from any thread."""
        job = self.job
        return {
            "replica": self.index,
            "state": self.state,
            "job": None if job is None else {"number": job.number, "call": job.call},
            "ranks": [rank.status() for rank in list(self.ranks)],
        }
