"""A job of the pool, seen by whoever submitted it: its events, its result, its errors."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from torch import Tensor

from .transport import Packed

POLL_SECONDS = 0.1
_KEPT_EVENTS = 2000  # of a job that nobody listens to


@dataclass(frozen=True)
class Progress:
    """`step` of `total` units of `stage` are done.

    `seconds_left` to the end of the stage is None until it can be told. `latent` is, now and then, the video latent as
    it stands, [C, T, H, W] on the CPU.
    """

    stage: str
    step: int
    total: int
    seconds_left: float | None = None
    latent: Tensor | None = None


@dataclass(frozen=True)
class LogLine:
    """A line for the user from a rank; `level` is a name of the logging module."""

    rank: int
    level: str
    text: str


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank: resident in host memory, and on its device in tensors and held by torch (None on the CPU)."""

    rank: int
    resident: int
    allocated: int | None = None
    reserved: int | None = None


Event = Progress | LogLine | Memory


class PoolError(RuntimeError):
    """The pool cannot do what was asked: a wrong description, or it was closed."""


class JobCancelledError(PoolError):
    """The job stopped because it was cancelled."""


class RankError(PoolError):
    """A rank failed. The text is a sentence with the cause, then the rank's last log lines, then its traceback.

    error_type, message: class name and text of the exception that the engine raised, or None and "" if the rank died,
    hung or never joined. survived: the pool goes on, because every rank raised the same at the same point; otherwise
    the workers were ended and the next job starts new ones, as `advice` says.
    """

    def __init__(
        self, sentence: str, *, rank: int, error_type: str | None = None, message: str = "", survived: bool = False,
        log_lines: tuple[str, ...] = (), traceback: str = "",
    ) -> None:  # fmt: skip
        self.rank, self.error_type, self.message, self.survived = rank, error_type, message, survived
        self.sentence, self.log_lines, self.traceback = sentence, log_lines, traceback
        self.advice = "" if survived else "\nThe workers were ended; the next run starts new ones."
        lines = f"\n\nLast log lines of rank {rank}:\n  " + "\n  ".join(log_lines) if log_lines else ""
        super().__init__(sentence + self.advice + lines + (f"\n\n{traceback}" if traceback else ""))


class Job:
    """Work given to the pool. Made by `Pool.submit`.

    As a context manager it cancels the job, and waits until the ranks have stopped, if the block ends by an exception:

        with pool.submit("sample", arguments) as job:
            for event in job.events(poll=raise_if_interrupted):
                ...
            result = job.result()
    """

    def __init__(
        self, number: int, call: str, replica: int | None, message: Packed, wake: Callable[[], None], patience: float
    ) -> None:
        """Not for callers. `message`: what the ranks are sent; `wake`: tells the pool to look; `patience`: the longest
        wait, in seconds, after a cancel."""
        self.number, self.call, self.replica, self.message = number, call, replica, message
        self.cancels = 0
        self._wake, self._patience, self._waits_until = wake, patience, 0.0
        self._changed = threading.Condition()
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._done = False
        self._result: dict[str, Any] = {}
        self._error: PoolError | None = None

    @property
    def done(self) -> bool:
        """Whether the job has ended, in whatever way."""
        return self._done

    def events(self, poll: Callable[[], None] | None = None) -> Iterator[Event]:
        """Iterate the events to the end of the job, in the caller's thread.

        `poll` is called at least every 0.1 s. Whatever it raises, and a KeyboardInterrupt while waiting, cancels the
        job, waits until all ranks have stopped at their common point, and passes on unchanged.
        """
        try:
            while True:
                if poll is not None:
                    poll()
                event = self._next_event()
                if event is not None:
                    yield event
                elif self._done and not self._events:
                    return
        except GeneratorExit:
            raise
        except BaseException:
            self._abandon()
            raise

    def result(
        self, on_event: Callable[[Event], None] | None = None, poll: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Wait for the end; returns what the engine's rank 0 returned.

        `on_event` is given each event, in this thread; `poll` as in `events`. What either raises cancels the job and
        passes on unchanged. Raises RankError, JobCancelledError or PoolError.
        """
        with self:
            for event in self.events(poll):
                if on_event is not None:
                    on_event(event)
        if self._error is not None:
            raise self._error
        return self._result

    def cancel(self) -> None:
        """Ask all ranks to stop at their next common check point; a second call ends the workers at once."""
        self.cancels += 1
        self._wake()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()

    def _abandon(self) -> None:
        """Cancel and wait for the end, once, at most as long as the pool needs to end workers that do not stop."""
        if not self._done and not self.cancels:
            self.cancel()
        self._waits_until = self._waits_until or time.monotonic() + self._patience
        while not self._done and time.monotonic() < self._waits_until:
            try:
                with self._changed:
                    self._changed.wait(POLL_SECONDS)
            except KeyboardInterrupt:  # pressed again: do not wait for the ranks
                self.cancel()

    def _next_event(self) -> Event | None:
        with self._changed:
            if not self._events and not self._done:
                self._changed.wait(POLL_SECONDS)
            return self._events.popleft() if self._events else None

    def add_event(self, event: Event) -> None:
        """For the pool. Only the newest latent is kept for a listener that is slow or absent: they are large."""
        with self._changed:
            if isinstance(event, Progress) and event.latent is not None:
                for i, old in enumerate(self._events):
                    if isinstance(old, Progress) and old.latent is not None:
                        self._events[i] = replace(old, latent=None)
            self._events.append(event)
            self._changed.notify_all()

    def finish(self, result: dict[str, Any] | None = None, error: PoolError | None = None) -> None:
        """For the pool: the job has ended."""
        with self._changed:
            if not self._done:
                self._result, self._error, self._done = result or {}, error, True
                self._changed.notify_all()

    def drop(self, error: PoolError | None) -> None:
        """For the pool: the job ends without having run."""
        self.message.close()
        self.finish(error=error)
