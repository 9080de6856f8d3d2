"""The persistent worker pool, seen from the client: start, submit, follow, cancel, stop.

    spec = PoolSpec("magi2_native.magi2_core.engine:make_engine", plan, ParallelLayout(sp=2), ("cuda:0", "cuda:1"))
    pool = Pool(spec)                                     # starts nothing yet
    job = pool.submit("sample", {"steps": 32, ...})       # the first job starts the workers
    result = job.result(on_event=show, poll=raise_if_interrupted)
    pool.close()

- `submit(call, arguments)` has every rank of one replica run `engine.run(call, arguments, events)`. Arguments and
  results are trees of None, bool, int, float, str, bytes, list, tuple, dict and tensors; tensors are copied once, at
  `submit`, and results are the caller's own. Stages ("load", "release", ...) are calls like any other.
- A call must not count on an earlier one: after a fault the next job runs in new processes, and with several
  replicas it may run in another one (`replica=` chooses).
- `job.events()` or `job.result(on_event=...)` deliver Progress, LogLine and Memory in the caller's thread. What `poll`
  or `on_event` raises cancels the job on all ranks and passes on unchanged.
- Errors: RankError (a rank raised, died, hung or never joined), JobCancelledError, PoolError.

Each replica is a world of its own. One thread owns all channels and processes, so that a KeyboardInterrupt in the
caller cannot fall into the middle of a message, ranks are watched while nobody waits, and the kernel's kill-with-parent
signal, which is tied to the starting thread, is tied to the pool's life (60 §6.5).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakSet

from .job import POLL_SECONDS, Event, Job, JobCancelledError, LogLine, Memory, PoolError, Progress, RankError
from .local import LocalReplica
from .remote import RemoteReplica
from .replica import Replica
from .spec import PoolSpec
from .transport import Packed
from .tree import TransportError

__all__ = [
    "Event", "Job", "JobCancelledError", "LogLine", "Memory", "Pool", "PoolError", "PoolSpec", "Progress", "RankError",
    "TransportError",
]  # fmt: skip

logger = logging.getLogger("magi2")
_running: WeakSet[Pool] = WeakSet()


class Pool:
    """Worker processes for one PoolSpec. All methods may be called from any thread."""

    def __init__(self, spec: PoolSpec) -> None:
        """Describe a pool; raises TransportError if the plan holds a value that cannot be sent to workers."""
        Packed(dict(spec.plan)).close()
        self.spec = spec
        kind = RemoteReplica if spec.sockets else LocalReplica
        self._replicas: list[Replica] = [kind(spec, index) for index in range(spec.layout.dp)]
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._openers: list[Job] = []
        self._jobs = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    # ---- for callers

    def open(self, poll: Callable[[], None] | None = None) -> Pool:
        """Start all workers and wait until every rank has reported; the first job would do it too.

        `poll` is called every 0.1 s; what it raises passes on, while the start goes on. Raises RankError or PoolError.
        """
        job = self._new_job("open", None, None)
        self._enqueue(job, self._openers)
        job.result(poll=poll)
        return self

    def submit(self, call: str, arguments: Mapping[str, Any] | None = None, replica: int | None = None) -> Job:
        """Queue a call of the engine; it runs on the first replica that is free, or on the one given.

        Raises TransportError for a value that cannot be sent, and PoolError if the pool is closed; then no rank has
        heard of the call.
        """
        if replica is not None and not 0 <= replica < len(self._replicas):
            raise PoolError(f"There is no replica {replica}; this pool has {len(self._replicas)}, numbered from 0.")
        job = self._new_job(call, dict(arguments or {}), replica)
        self._enqueue(job, self._queue)
        return job

    def close(self) -> None:
        """End all workers (orderly for 3 s, by SIGTERM for 2 s, then by SIGKILL); unfinished jobs raise PoolError."""
        self.begin_close()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def begin_close(self) -> None:
        """The first half of `close`, which does not wait: several pools end at the same time."""
        with self._lock:
            self._closing = True
        self._wake()

    @property
    def alive(self) -> bool:
        """Whether at least one replica is up."""
        return any(replica.state in ("idle", "busy") for replica in self._replicas)

    def status(self) -> dict[str, Any]:
        """Replicas with state, job and ranks (pid, device, memory, last log lines), as plain values; never waits."""
        return {
            "engine": self.spec.engine,
            "layout": self.spec.layout.label,
            "closed": self._closing,
            "queued": len(self._queue),
            "replicas": [replica.status() for replica in self._replicas],
        }

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- hand-over to the pool's thread

    def _new_job(self, call: str, arguments: dict[str, Any] | None, replica: int | None) -> Job:
        with self._lock:
            if self._closing:
                raise PoolError("The pool is closed; make a new one.")
            self._jobs += 1
            number = self._jobs
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="magi2-pool", daemon=True)
                self._thread.start()
                _watch_exit(self)
        message = Packed({"kind": "run", "job": number, "call": call, "arguments": arguments})
        return Job(number, call, replica, message, self._wake, patience=self.spec.grace_seconds + 20)

    def _enqueue(self, job: Job, waiting: list[Job] | deque[Job]) -> None:
        with self._lock:
            closed = self._closing  # meanwhile, and then nobody would look at the queue again
            if not closed:
                waiting.append(job)
        if closed:
            job.message.close()
            raise PoolError("The pool is closed; make a new one.")
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # already woken many times over, or closed
            self._waker.send(b"x")

    # ---- the pool's thread

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by workers from their first instant
        error = PoolError("The pool was closed.")
        try:
            while not self._closing:
                self._step()
            for replica in self._replicas:
                replica.ask_to_quit()
            for replica in self._replicas:
                replica.quit()
        except BaseException as fault:  # a bug of ours must not leave callers waiting
            logger.exception("The worker pool failed.")
            error = PoolError(f"The worker pool failed: {type(fault).__name__}: {fault}")
        finally:
            self._end(error)

    def _step(self) -> None:
        files = [file for replica in self._replicas for file in replica.files()]
        ready = wait([self._woken, *files], POLL_SECONDS)
        if self._woken in ready:
            self._woken.recv(4096)
        for replica in self._replicas:
            replica.receive(ready)
            replica.advance()
        self._drop_cancelled()
        self._dispatch()

    def _drop_cancelled(self) -> None:
        with self._lock:
            cancelled = [job for job in (*self._queue, *self._openers) if job.cancels]
            self._remove(cancelled)
        for job in cancelled:
            job.drop(JobCancelledError("The job was cancelled before it began."))

    def _dispatch(self) -> None:
        """Give jobs to idle replicas, start replicas that are needed, and report starts that failed."""
        self._report_starts()
        with self._lock:
            waiting = list(self._queue)
        free = [replica for replica in self._replicas if replica.state != "busy"]
        for job in waiting:
            # An idle replica first; else wait for one that is starting; else start one.
            fitting = [replica for replica in free if job.replica in (None, replica.index)]
            if not fitting:
                continue
            replica = min(fitting, key=lambda replica: ("idle", "starting", "down").index(replica.state))
            free.remove(replica)
            if replica.state == "idle":
                with self._lock:
                    self._queue.remove(job)
                replica.run(job)
            elif replica.state == "down":
                replica.start()
        if self._openers:
            for replica in self._replicas:
                if replica.state == "down" and replica.start_error is None:
                    replica.start()

    def _report_starts(self) -> None:
        """Tell the outcome of starts to those who wait in `open`, a failure else to the oldest job it holds up."""
        for replica in self._replicas:
            error, replica.start_error = replica.start_error, None
            if error is None:
                continue
            with self._lock:
                held_up = [job for job in self._queue if job.replica in (None, replica.index)]
                told = list(self._openers) or held_up[:1]
                self._remove(told)
            for job in told:
                job.drop(error)
        if self._openers and all(replica.state in ("idle", "busy") for replica in self._replicas):
            with self._lock:
                openers = list(self._openers)
                self._remove(openers)
            for job in openers:
                job.drop(None)

    def _remove(self, jobs: list[Job]) -> None:
        """Take jobs out of the queue and of those who wait for a start; the lock is held."""
        for waiting in (self._queue, self._openers):
            kept = [job for job in waiting if job not in jobs]
            waiting.clear()
            waiting.extend(kept)

    def _end(self, error: PoolError) -> None:
        with self._lock:
            self._closing = True
            jobs = [*self._queue, *self._openers]
            self._remove(jobs)
        for replica in self._replicas:
            jobs += [replica.job] if replica.job is not None else []
            replica.kill()
            replica.job = None
        for job in jobs:
            job.drop(error)
        _running.discard(self)
        self._woken.close()
        self._waker.close()


def _watch_exit(pool: Pool) -> None:
    """Close the pool when the interpreter ends, and let go of it in forked copies of this process."""
    if not _registered:
        _registered.append(True)
        atexit.register(_close_all)
        os.register_at_fork(after_in_child=_let_go)
    _running.add(pool)


_registered: list[bool] = []


def _close_all() -> None:
    pools = list(_running)
    for pool in pools:
        pool.begin_close()
    for pool in pools:
        pool.close()


def _let_go() -> None:
    """In a forked child: close the life pipes, or the workers would outlive their real parent in it (60 §6.5)."""
    for pool in list(_running):
        for replica in pool._replicas:
            replica.let_go()
    _running.clear()
