"""How all ranks of a replica stop a job at the same check point (60 §6.6, 80 §2).

Every rank calls `events.check()` equally often in a job, so check points have numbers. A rank that stopped alone would
leave the others in a collective forever; therefore the ranks agree on one number at which all of them stop.

On one host they agree in a page of shared memory, under a lock that the kernel frees when its holder dies:

- each rank writes there how many check points it has passed;
- the first rank that sees the request at a check point sets the stop at 1 + the largest of those numbers;
- a rank stops when it comes to that number.

Reading the request, choosing the number and passing a check point all happen under the lock. So no rank has passed
the chosen number, none can pass it later, and each rank gets there, because the ranks stop nowhere else and all
collectives before that number are complete on every rank. No collective is added, and no bound is assumed on how far
one rank runs ahead of another, as happens where a stage works on one rank only. A check costs two system calls,
a few microseconds.

Over several hosts, which share no memory, the same is done by messages: when a stop is asked for, each rank holds at
its next check point and says how many it has passed, and rank 0 answers with 1 + the largest. Until then a check is
local.
"""

from __future__ import annotations

import mmap
import os
import threading

_REQUEST, _STOP, _PASSED = 0, 1, 2  # 64-bit words of the page; the last is one word for each rank


class StopPage:
    """The shared page of one replica, seen from the client or from a rank."""

    def __init__(self, file: int, ranks: int, rank: int | None = None) -> None:
        """Map the page in `file`, which stays open as the lock; `rank` is None for the client."""
        size = 8 * (_PASSED + ranks)
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._file, self._ranks, self._rank = file, ranks, rank
        self._words = memoryview(mmap.mmap(file, size)).cast("q")

    def reset(self) -> None:
        """Begin a job; the client calls it while every rank is idle."""
        for word in range(len(self._words)):
            self._words[word] = 0

    def request_stop(self, job: int) -> None:
        """Ask the ranks to stop `job`; later jobs are not touched."""
        self._words[_REQUEST] = job

    def passes(self, job: int) -> bool:
        """Whether this rank goes past its next check point of `job`; False again and again once it must stop."""
        import fcntl

        assert self._rank is not None
        mine = _PASSED + self._rank
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            words = self._words
            if words[_REQUEST] == job and not words[_STOP]:
                words[_STOP] = 1 + max(words[_PASSED : _PASSED + self._ranks])
            if words[_STOP] and words[mine] + 1 >= words[_STOP]:
                return False
            words[mine] += 1
            return True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


class StopByMessage:
    """One rank's part where there is no shared page: its count, held while rank 0 looks for the number to stop at."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._job, self._passed, self._held, self._stop = 0, 0, False, 0

    def passes(self, job: int) -> bool:
        """As `StopPage.passes`; waits while the count is held."""
        with self._changed:
            self._turn_to(job)
            while self._held:
                self._changed.wait()
            if self._stop and self._passed + 1 >= self._stop:
                return False
            self._passed += 1
            return True

    def hold(self, job: int) -> int:
        """Let no check point of `job` be passed from now on; returns how many were."""
        with self._changed:
            self._turn_to(job)
            self._held = self._job == job
            return self._passed

    def stop_at(self, job: int, number: int) -> None:
        """Go on, and stop at check point `number` of `job`."""
        with self._changed:
            if self._job == job:
                self._held, self._stop = False, number
                self._changed.notify_all()

    def _turn_to(self, job: int) -> None:
        """A message about a job may arrive before the job does."""
        if job > self._job:
            self._job, self._passed, self._held, self._stop = job, 0, False, 0
