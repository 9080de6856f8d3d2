"""Engines for the tests of the worker pool: small, exact, and able to fail in every way that a real one can."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import warnings
from typing import Any

import torch

from ..distributed.exchange import ParallelContext, all_reduce_sum
from ..magi2_core.events import Events


class CustomError(Exception):
    """An error whose constructor does not take its own text back, so that it cannot be pickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def make_engine(plan: dict[str, Any], parallel: ParallelContext) -> PoolEngine:
    """The factory; the plan may say which rank hangs, raises or dies while starting."""
    rank = parallel.rank
    if plan.get("hang_at_start") == rank:
        logging.getLogger("magi2").info("rank %d waits for nothing", rank)
        time.sleep(600)
    if plan.get("raise_at_start") == rank:
        raise CustomError("no", "engine today")
    if plan.get("die_at_start") == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return PoolEngine(plan, parallel)


class PoolEngine:
    """`run` calls the method of the call's name."""

    def __init__(self, plan: dict[str, Any], parallel: ParallelContext) -> None:
        self.plan, self.parallel = plan, parallel
        self.kept: list[torch.Tensor] = []

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        return getattr(self, call)(events, **arguments)

    def meet(self) -> int:
        """A collective of all ranks: how many take part."""
        one = torch.ones(1)
        return int(all_reduce_sum(one, self.parallel.replica_group).item())

    @property
    def rank(self) -> int:
        """This rank's number within its replica."""
        return self.parallel.rank % self.parallel.layout.replica

    def echo(self, events: Events, **arguments: Any) -> dict[str, Any]:
        return arguments

    def where(self, events: Events) -> dict[str, Any]:
        """What this worker sees of its surroundings."""
        return {
            "pid": os.getpid(), "modules": sorted(sys.modules), "environment": dict(os.environ), "path": list(sys.path),
            "arguments": list(sys.argv), "ranks": self.meet(), "folder": os.getcwd(),
            "threads": torch.get_num_threads(), "plan": self.plan, "rank": self.parallel.rank,
            "layout": self.parallel.layout.label,
        }  # fmt: skip

    def walk(
        self, events: Events, steps: int, layers: int = 4, seconds: float = 0.0, latents: bool = False
    ) -> dict[str, Any]:
        """Steps of layers, a collective and a check point in each layer; returns a number that depends on all of it."""
        total = 0
        latent = torch.zeros(4, 2, 8, 8)
        for step in range(steps):
            for layer in range(layers):
                events.check()
                total += (step + 1) * (layer + 1) * self.meet()
                time.sleep(seconds / layers)
            latent = latent + 1
            events.progress("walk", step + 1, steps, latent if latents else None)
        return {"total": total}

    def apart(self, events: Events, rank: int, checks: int, seconds: float) -> dict[str, Any]:
        """Check points without collectives, at which one rank is slow: the others run far ahead of it."""
        for _ in range(checks):
            events.check()
            if self.rank == rank:
                time.sleep(seconds)
        return {"ranks": self.meet()}

    def alone(self, events: Events, steps: int, seconds: float, fail: bool = False) -> dict[str, Any]:
        """A call of the first rank only; the others return at once."""
        if self.rank:
            return {}
        for step in range(steps):
            events.check()
            time.sleep(seconds)
            events.progress("alone", step + 1, steps)
        if fail:
            raise ValueError("alone")
        return {"steps": steps}

    def uneven(self, events: Events) -> dict[str, Any]:
        """A faulty engine: each rank passes another number of check points."""
        for _ in range(self.rank + 1):
            events.check()
        return {}

    def fail(self, events: Events, text: str, rank: int | None = None) -> dict[str, Any]:
        """Raise on one rank, while the others wait in a collective, or on all."""
        logging.getLogger("magi2").info("about to fail")
        if rank is None or rank == self.rank:
            raise ValueError(text)
        self.meet()
        return {}

    def fail_apart(self, events: Events, rank: int | None = None) -> dict[str, Any]:
        """Raise on every rank, each with a text of its own; on `rank` another error."""
        events.check()
        if rank == self.rank:
            raise KeyError("another")
        raise MemoryError(f"{self.rank} bytes are free")

    def die(self, events: Events, how: str, rank: int, seconds: float = 0.0) -> dict[str, Any]:
        """End one rank by a signal, an exit or a segmentation fault, while the others are busy or wait for it."""
        logging.getLogger("magi2").info("about to die by %s", how)
        if rank == self.rank:
            if how == "exit":
                os._exit(7)
            if how == "segfault":
                ctypes.string_at(0)
            os.kill(os.getpid(), getattr(signal, how))
        time.sleep(seconds)
        self.meet()
        return {}

    def hold(self, events: Events, seconds: float, rank: int | None = None) -> dict[str, Any]:
        """Sleep in C code without giving up the interpreter's lock."""
        events.progress("hold", 0, 1)
        if rank is None or rank == self.rank:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))
        return {}

    def swallow(self, events: Events) -> dict[str, Any]:
        """Careless code: it catches every Exception around its check points."""
        for _ in range(1000):
            try:
                events.check()
                self.meet()
            except Exception:
                pass
            time.sleep(0.01)
        return {}

    def talk(self, events: Events, lines: int) -> dict[str, Any]:
        for i in range(lines):
            logging.getLogger("magi2.test").info("line %d", i)
        logging.getLogger("other").info("not for you")
        logging.getLogger("other").warning("take care")
        warnings.warn("as everywhere", stacklevel=1)
        events.log("for the user")
        return {}

    def frames(self, events: Events, count: int, height: int, width: int) -> dict[str, Any]:
        """Frames uint8 [count, height, width, 3]; pixel values are their index modulo 251."""
        size = count * height * width * 3
        if not self.kept or self.kept[0].numel() != size:
            self.kept = [(torch.arange(size) % 251).to(torch.uint8)]
        return {"frames": self.kept[0].view(count, height, width, 3)}

    def keep(self, events: Events, megabytes: int) -> dict[str, Any]:
        """Make this rank's memory exactly so much larger; 0 lets go of it."""
        self.kept = [torch.ones(megabytes << 18)] if megabytes else []
        return {}

    def unsendable(self, events: Events) -> dict[str, Any]:
        return {"value": object()}
