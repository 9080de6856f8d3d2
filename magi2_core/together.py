"""Check points of calls in which the ranks of a replica have unequal work (80 line 2).

A cancel takes effect at the next check point that no rank has passed yet. A rank that runs ahead of the others to the
end of its work leaves no such point: nobody could be stopped any more, and in the end all ranks would be killed. Here
the ranks pass their check points in step, and what the first one does alone, such as writing a file, the others follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from ..distributed.exchange import ParallelContext, broadcast_text, smallest
from .errors import Magi2Error, named
from .events import Events

Made = TypeVar("Made")
# What the first rank tells the others while it works alone; else it is the name of an error and its text.
_PASS, _DONE = "", "done"


class Together:
    """The events of such a call, on every rank of the replica. A process alone is the first rank of one."""

    def __init__(self, events: Events, parallel: ParallelContext, every: int = 1) -> None:
        """every: at how many check points the ranks wait once for each other."""
        self._events, self._group, self._every = events, parallel.replica_group, every
        self._leads = parallel.rank % parallel.layout.replica == 0
        self._passed = 0

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self._events.progress(stage, done, total, latent)

    def log(self, text: str) -> None:
        self._events.log(text)

    def check(self) -> None:
        """Wait for all ranks, then pass a check point with them."""
        if self._passed % self._every == 0:
            smallest(0, self._group)
        self._passed += 1
        self._events.check()

    def alone(self, work: Callable[[Events], Made]) -> Made | None:
        """What `work` returns on the first rank, None on the others, which pass the check points of its events too.

        A Magi2Error of it is raised on all ranks, so that they end the call alike. Nothing but what the others cannot
        meet may be done in `work`: a rank that raised by itself would not hear what it is told.
        """
        if not self._leads:
            self._follow()
            return None
        try:
            made = work(_First(self))
        except Magi2Error as error:
            broadcast_text(f"{type(error).__name__} {error}", self._group)
            raise
        broadcast_text(_DONE, self._group)
        return made

    def _follow(self) -> None:
        while (told := broadcast_text("", self._group)) == _PASS:
            self._events.check()
        if told != _DONE:
            name, _, sentence = told.partition(" ")
            raise (named(name) or Magi2Error)(sentence)


class _First:
    """The events of what the first rank does alone."""

    def __init__(self, together: Together) -> None:
        self._together = together

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self._together.progress(stage, done, total, latent)

    def log(self, text: str) -> None:
        self._together.log(text)

    def check(self) -> None:
        """Have the others pass this check point too, then pass it."""
        broadcast_text(_PASS, self._together._group)
        self._together._events.check()
