"""A short run of the long commands: jobs with random cancels and kills, and what the pool costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from magi2_native.benchmarks.pool_overhead import ENGINE, hand_over, step_overhead
from magi2_native.benchmarks.pool_soak import soak
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.distributed.pool import Pool, PoolSpec


def test_jobs_with_random_cancels_and_kills_stay_right_and_leave_nothing() -> None:
    report = soak(ParallelLayout(sp=2), jobs=16, seed=3)
    assert report.wrong == []
    assert report.ends["finish: done"] == 10
    assert report.ends["cancel: stopped"] + report.ends["cancel: done"] == 3
    assert report.ends["kill: error"] + report.ends["kill: done"] == 2
    assert report.ends["raise: error"] == 1
    assert report.starts > 1


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(PoolSpec(ENGINE)) as pool:
        yield pool.open()


def test_a_step_costs_less_than_five_milliseconds_more_than_in_process(pool: Pool) -> None:
    assert min(step_overhead(pool, steps=10, rounds=3) for _ in range(3)) < 5e-3


def test_handing_over_125_frames_takes_less_than_one_and_a_half_copies(pool: Pool) -> None:
    """Best of three, because other work on the machine disturbs a ratio of times."""
    assert min(hand_over(pool, (125, 256, 448, 3), rounds=5).ratio for _ in range(3)) < 1.5
