"""Many jobs in a row, some cancelled, some with a rank killed: results stay right and nothing accumulates.

    python -m magi2_native.benchmarks.pool_soak --jobs 200 --layout sp2

Each job computes a number exactly that depends on every step, layer and rank, and returns it with some megabytes of
frames. A fixed share of the jobs, in random order, is cancelled at a random moment, has a random rank killed, or raises
on one rank. After each job the result or the error, its delay, the memory of the ranks and of this process, and the
open files are checked. The exit code is 1 if anything was wrong; the last lines count.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..distributed.exchange import ParallelContext, all_reduce_sum
from ..distributed.layout import LayoutError, ParallelLayout
from ..distributed.pool import Job, JobCancelledError, Pool, PoolSpec, RankError
from ..distributed.worker import resident_bytes
from ..magi2_core.events import SILENT

ENGINE = "magi2_native.benchmarks.pool_soak:make_engine"
LAYERS, WIDTH, PRIME = 6, 4096, 1_000_003
FRAMES = (20, 256, 448, 3)
SHARES = {"finish": 0.6, "cancel": 0.2, "kill": 0.12, "raise": 0.08}
ERROR_SECONDS, STOP_SECONDS = 10.0, 2.0
GROWTH_BYTES = 24 << 20


class SoakEngine:
    """Integer arithmetic over a vector that the ranks divide: exact, and equal for every number of ranks."""

    def __init__(self, parallel: ParallelContext) -> None:
        self.parallel = parallel
        ranks = parallel.layout.replica
        self.own = torch.arange(WIDTH, dtype=torch.int64)[parallel.rank % ranks :: ranks]

    def run(self, call: str, arguments: dict[str, Any], events: Any) -> dict[str, Any]:
        steps, value = arguments["steps"], arguments["seed"]
        for step in range(steps):
            for layer in range(LAYERS):
                events.check()
                if arguments["raise_in"] == [step, self.parallel.rank % self.parallel.layout.replica]:
                    raise ArithmeticError("as ordered")
                part = ((self.own * (value + layer)) % PRIME).sum()
                value = int(all_reduce_sum(part.reshape(1), self.parallel.replica_group).item()) % PRIME
                time.sleep(arguments["pause"])
            events.progress("steps", step + 1, steps, torch.full((4, 2, 16, 16), float(value)))
        return {"value": value, "frames": torch.full(FRAMES, value % 256, dtype=torch.uint8)}


def make_engine(plan: dict[str, Any], parallel: ParallelContext) -> SoakEngine:
    torch.set_num_threads(1)
    return SoakEngine(parallel)


def expected(arguments: dict[str, Any]) -> int:
    """The value of a job, computed in this process alone."""
    alone = {**arguments, "pause": 0, "raise_in": None}
    value: int = SoakEngine(ParallelContext.single()).run("steps", alone, SILENT)["value"]
    return value


@dataclass
class Report:
    """What happened: how the jobs ended, the longest waits, and everything that was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    slowest_error: float = 0.0
    slowest_stop: float = 0.0
    wrong: list[str] = field(default_factory=list)


def soak(layout: ParallelLayout, jobs: int, seed: int) -> Report:
    """Run the jobs on a pool of their own and check after each one, and after the end, that nothing is left."""
    chance, report = random.Random(seed), Report()
    fates = [fate for fate, share in SHARES.items() for _ in range(round(jobs * share))]
    fates = (fates + ["finish"] * jobs)[:jobs]
    chance.shuffle(fates)
    shared = sorted(os.listdir("/dev/shm"))
    open_files = len(os.listdir("/proc/self/fd"))
    memory = MemoryWatch(report)
    workers: set[int] = set()
    with Pool(PoolSpec(ENGINE, {}, layout)) as pool:
        for number, fate in enumerate(fates):
            pool.open()
            now = pids(pool)
            report.starts += bool(set(now) - workers)
            workers.update(now)
            disturb(pool, fate, chance, report, number)
            memory.look(pool, number)
    gc.collect()
    alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    if alive:
        report.wrong.append(f"processes {alive} are left")
    if new := [name for name in os.listdir("/dev/shm") if name not in shared]:
        report.wrong.append(f"files {new} are left in /dev/shm")
    # multiprocessing keeps one pipe to its resource tracker for the life of the process.
    if (left := len(os.listdir("/proc/self/fd")) - open_files) > 1:
        report.wrong.append(f"{left} more files are open than before")
    return report


def disturb(pool: Pool, fate: str, chance: random.Random, report: Report, number: int) -> None:
    """Run one job and give it its fate; note how it ended and what was not as it must be."""
    steps, pause = chance.randint(3, 12), chance.choice((0.0, 0.001, 0.004))
    ranks = pool.spec.layout.replica
    raise_in = [chance.randrange(steps), chance.randrange(ranks)] if fate == "raise" else None
    arguments = {"seed": chance.randrange(PRIME), "steps": steps, "pause": pause, "raise_in": raise_in}
    job = pool.submit("steps", arguments)
    moment = chance.random() * steps * LAYERS * (pause + 0.0002)
    if fate in ("cancel", "kill"):
        time.sleep(moment)
    disturbed = time.monotonic()
    if fate == "cancel":
        job.cancel()
    elif fate == "kill":
        os.kill(chance.choice(pids(pool)), signal.SIGKILL)
    end, result = outcome(job)
    delay = time.monotonic() - disturbed
    report.ends[f"{fate}: {end}"] += 1
    if end == "error":
        report.slowest_error = max(report.slowest_error, delay)
    elif end == "stopped":
        report.slowest_stop = max(report.slowest_stop, delay)
    allowed = {"finish": ("done",), "cancel": ("done", "stopped"), "kill": ("done", "error"), "raise": ("error",)}
    if end not in allowed[fate]:
        report.wrong.append(f"job {number} ({fate}) ended as {end}: {result}")
    if (end == "error" and delay > ERROR_SECONDS) or (end == "stopped" and delay > STOP_SECONDS):
        report.wrong.append(f"job {number} ({fate}) was {end} only after {delay:.1f} s")
    if end == "done" and isinstance(result, dict):
        value = expected(arguments)
        if result["value"] != value or not bool((result["frames"] == value % 256).all()):
            report.wrong.append(f"job {number} ({fate}) gave {result['value']} instead of {value}")


def outcome(job: Job) -> tuple[str, dict[str, Any] | str]:
    try:
        return "done", job.result(on_event=lambda _: None)
    except JobCancelledError as error:
        return "stopped", str(error)
    except RankError as error:
        return "error", str(error)


class MemoryWatch:
    """Notes growth: of each worker since its second finished look, and of this process since the tenth job."""

    def __init__(self, report: Report) -> None:
        self._report, self._seen, self._base, self._own = report, Counter[int](), dict[int, int](), 0

    def look(self, pool: Pool, number: int) -> None:
        for rank in pool.status()["replicas"][0]["ranks"]:
            if rank["memory"] is not None:
                self._compare(f"rank {rank['rank']}", number, rank["memory"]["resident"], rank["pid"], after=2)
        gc.collect()
        self._compare("this process", number, resident_bytes(), 0, after=10)

    def _compare(self, who: str, number: int, size: int, key: int, after: int) -> None:
        self._seen[key] += 1
        if self._seen[key] <= after:
            self._base[key] = size
        elif size > self._base[key] + GROWTH_BYTES:
            self._report.wrong.append(f"{who} grew by {(size - self._base[key]) >> 20} MB by job {number}")


def pids(pool: Pool) -> list[int]:
    return [rank["pid"] for replica in pool.status()["replicas"] for rank in replica["ranks"]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Many jobs with random cancels and kills on one worker pool.")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--layout", default="sp2", help="sp2, tp2sp2, … (default sp2)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        layout = ParallelLayout.parse(given.layout)
    except LayoutError as error:
        parser.error(str(error))
    start = time.monotonic()
    report = soak(layout, given.jobs, given.seed)
    for problem in report.wrong:
        print("wrong:", problem)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(report.ends.items()))
    print(f"{given.jobs} jobs on {layout.label} in {time.monotonic() - start:.0f} s: {ends}")
    print(f"{report.starts} starts of the workers; slowest error after {report.slowest_error:.2f} s, "
          f"slowest stop after {report.slowest_stop:.2f} s")  # fmt: skip
    print("nothing was wrong" if not report.wrong else f"{len(report.wrong)} things were wrong")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
