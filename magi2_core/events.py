"""How a running stage talks to whoever asked for it: progress, log lines, and the points where it may be stopped."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Events(Protocol):
    """What the engine is given with each request.

    In a worker, `check` is a point that all ranks reach together and leave together: the ranks first agree whether
    to stop, then every one of them raises (60 §6.6). The core never catches what `check` raises.
    """

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        """Report that `done` of `total` units of `stage` are finished; `latent` is a picture of the work so far.

        `latent` is the current video latent [C, T, H, W] fp32, on any device; the receiver may drop it.
        """

    def log(self, text: str) -> None:
        """Pass on one line for the user."""

    def check(self) -> None:
        """Return if the work should go on; raise if it was cancelled."""


class Silent:
    """Events that go nowhere: for tests and for callers that only want the result."""

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        pass

    def log(self, text: str) -> None:
        pass

    def check(self) -> None:
        pass


SILENT = Silent()
