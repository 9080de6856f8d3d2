"""What the worker pool costs: per step against the same engine in process, and for handing over frames.

    python -m magi2_native.benchmarks.pool_overhead

One rank on the CPU. A step does a little work, passes a check point for each of 36 layers and reports progress. The
hand-over of 125 frames is the time of a job that only returns them, until every page can be read, less that of a job
that returns nothing, against copying the same bytes to fresh memory; the two are measured by turns. Absolute times
belong to this machine; the ratio says more.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed.exchange import ParallelContext
from ..distributed.pool import Pool, PoolSpec
from ..magi2_core.events import SILENT

ENGINE = "magi2_native.benchmarks.pool_overhead:make_engine"
LAYERS, WIDTH, PAGE = 36, 256, 4096
SIZES = ((125, 256, 448, 3), (125, 544, 960, 3))  # 272p and 540p


@dataclass(frozen=True)
class HandOver:
    """Seconds to hand over frames and to copy them: the best of the rounds, in which the machine did least else."""

    shape: tuple[int, ...]
    handed: float
    copied: float

    @property
    def ratio(self) -> float:
        return self.handed / self.copied


class StepEngine:
    def __init__(self) -> None:
        self._frames: Tensor | None = None

    def run(self, call: str, arguments: dict[str, Any], events: Any) -> dict[str, Any]:
        if call == "nothing":
            return {}
        if call == "frames":
            shape = arguments["shape"]
            if self._frames is None or self._frames.shape != torch.Size(shape):
                self._frames = torch.randint(0, 256, shape, dtype=torch.uint8)
            return {"frames": self._frames}
        x_WW = torch.eye(WIDTH)
        for step in range(arguments["steps"]):
            for _ in range(LAYERS):
                events.check()
                x_WW = x_WW @ x_WW
            events.progress("steps", step + 1, arguments["steps"])
        return {"sum": x_WW.sum().item()}


def make_engine(plan: dict[str, Any], parallel: ParallelContext) -> StepEngine:
    torch.set_num_threads(1)
    return StepEngine()


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    result = work()  # kept, so that giving its memory back is not part of the time
    seconds = time.perf_counter() - start
    del result
    return seconds


def step_overhead(pool: Pool, steps: int, rounds: int) -> float:
    """Seconds that the pool adds to a step, median over rounds of both by turns."""
    torch.set_num_threads(1)
    local, added = StepEngine(), []
    for _ in range(rounds):
        inside = _seconds(lambda: local.run("steps", {"steps": steps}, SILENT))
        pooled = _seconds(lambda: pool.submit("steps", {"steps": steps}).result(on_event=lambda _: None))
        added.append((pooled - inside) / steps)
    return statistics.median(added)


def hand_over(pool: Pool, shape: tuple[int, ...], rounds: int) -> HandOver:
    """Measure one size; raises AssertionError if what arrives is not what was sent."""

    def fetch() -> Tensor:
        frames: Tensor = pool.submit("frames", {"shape": list(shape)}).result()["frames"]
        frames.flatten()[::PAGE].sum()
        return frames

    frames = fetch().clone()
    handed, copied, empty = [], [], []
    for _ in range(rounds):
        handed.append(_seconds(fetch))
        copied.append(_seconds(frames.clone))
        empty.append(_seconds(lambda: pool.submit("nothing").result()))
    assert torch.equal(fetch(), frames)
    return HandOver(shape, min(handed) - min(empty), min(copied))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What the worker pool costs, per step and for handing over frames.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    with Pool(PoolSpec(ENGINE)) as pool:
        pool.open()
        added = step_overhead(pool, given.steps, given.rounds)
        print(f"a step with {LAYERS} check points: {added * 1e3:.3f} ms more than in process")
        for shape in SIZES:
            result = hand_over(pool, shape, given.rounds)
            megabytes = torch.Size(shape).numel() / 1e6
            print(f"{shape}: {megabytes:.0f} MB handed over in {result.handed * 1e3:.1f} ms, copied in "
                  f"{result.copied * 1e3:.1f} ms, ratio {result.ratio:.2f}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
