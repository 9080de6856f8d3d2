"""Ranks that are asked to stop agree on one check point, however far apart they run, and pay next to nothing for it."""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from multiprocessing.connection import Connection

import pytest
from magi2_native.distributed.agreement import StopPage
from magi2_native.distributed.transport import anonymous_file


def _rank(file: int, rank: int, ranks: int, seed: int, out: Connection) -> None:
    """Pass check points at an uneven pace until told to stop; report how many."""
    page, pace, passed = StopPage(file, ranks, rank), random.Random(seed + rank), 0
    while page.passes(1):
        passed += 1
        if pace.random() < 0.02:
            time.sleep(pace.random() * 0.004 * (rank + 1))
    again = page.passes(1)
    out.send((passed, again))


@pytest.mark.parametrize("seed", range(8))
def test_ranks_without_any_collective_stop_at_the_same_check_point(seed: int) -> None:
    ranks = 4
    file = anonymous_file()
    page = StopPage(file, ranks)
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(file, rank, ranks, seed, pipes[rank][1]), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    time.sleep(0.03 + 0.01 * seed)
    page.request_stop(1)
    answers = [pipe.recv() if pipe.poll(20) else None for pipe, _ in pipes]
    for process in processes:
        process.kill()
        process.join()
    os.close(file)
    passed = {answer[0] for answer in answers if answer}
    assert len(passed) == 1, answers
    assert passed.pop() > 10
    assert {answer[1] for answer in answers if answer} == {False}, "a rank that asks again must not go on"


def test_a_stop_asked_of_an_earlier_job_does_not_stop_this_one() -> None:
    file = anonymous_file()
    page, rank = StopPage(file, 1), StopPage(file, 1, 0)
    page.request_stop(6)
    assert rank.passes(7)
    assert not rank.passes(6)
    page.reset()
    assert rank.passes(6)
    os.close(file)


def test_the_lock_of_a_killed_rank_is_free() -> None:
    import fcntl

    file = anonymous_file()

    def hold(ready: Connection) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX)
        ready.send("held")
        time.sleep(60)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv() == "held"
    passed = threading.Event()
    page = StopPage(file, 2, 0)
    thread = threading.Thread(target=lambda: page.passes(1) and passed.set(), daemon=True)
    thread.start()
    assert not passed.wait(0.2), "the lock did not hold"
    process.kill()
    assert passed.wait(5)
    thread.join()
    process.join()
    os.close(file)


def test_a_check_costs_microseconds() -> None:
    """36 layers check once each; at 100 microseconds a check that would be 3.6 ms of a step."""
    file = anonymous_file()
    rank = StopPage(file, 8, 0)
    best = min(_seconds(rank) for _ in range(5))
    os.close(file)
    assert best / 1000 < 50e-6


def _seconds(rank: StopPage) -> float:
    start = time.perf_counter()
    for _ in range(1000):
        rank.passes(1)
    return time.perf_counter() - start
