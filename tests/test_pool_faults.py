"""Ranks that die, raise, hang or never join: one error in time, with rank, cause and last lines; then all is well."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.distributed.pool import JobCancelledError, Pool, PoolError, PoolSpec, Progress, RankError

ENGINE = "magi2_native.tests.pool_engines:make_engine"
TWO = ParallelLayout(sp=2)
RIGHT = {"steps": 3}, {"total": 120}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two ranks; the tests that use it end them, and the next job starts new ones."""
    with Pool(PoolSpec(ENGINE, {}, TWO, grace_seconds=1)) as pool:
        yield pool


def pids(pool: Pool) -> list[int]:
    return [rank["pid"] for replica in pool.status()["replicas"] for rank in replica["ranks"]]


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def failure(pool: Pool, call: str, arguments: dict[str, Any]) -> RankError:
    """The error of a job that must fail within 10 s and leave no worker; the pool must then do the next one."""
    pool.open()
    workers = pids(pool)
    start = time.monotonic()

    def poll() -> None:
        assert time.monotonic() - start < 10, "the error has not come within 10 s"

    with pytest.raises(RankError) as caught:
        pool.submit(call, arguments).result(poll=poll)
    assert not caught.value.survived
    assert not pool.alive
    assert not [pid for pid in workers if running(pid)]
    return caught.value


@pytest.mark.parametrize(
    ("how", "rank", "cause"),
    [
        ("SIGKILL", 1, "killed by SIGKILL (the kernel's out-of-memory killer does that"),
        ("SIGTERM", 0, "killed by SIGTERM"),
        ("exit", 1, "ended with exit code 7"),
        ("segfault", 0, "killed by SIGSEGV"),
    ],
)
def test_a_rank_that_dies_is_named_with_the_cause_and_its_last_lines(
    pool: Pool, how: str, rank: int, cause: str
) -> None:
    error = failure(pool, "die", {"how": how, "rank": rank})
    assert error.rank == rank
    assert error.error_type is None
    assert error.sentence.startswith(f"Rank {rank} (cpu, pid ")
    assert f"{cause}" in error.sentence
    assert f"INFO about to die by {how}" in error.log_lines
    assert "the next run starts new ones" in str(error)
    if how == "segfault":
        assert "in die" in error.traceback, "the stack at the crash"
    arguments, result = RIGHT
    assert pool.submit("walk", arguments).result() == result


def test_a_death_is_noticed_while_the_other_ranks_know_nothing_of_it(pool: Pool) -> None:
    error = failure(pool, "die", {"how": "SIGKILL", "rank": 1, "seconds": 30})
    assert error.rank == 1


def test_a_rank_that_raises_releases_the_others_at_once(pool: Pool) -> None:
    error = failure(pool, "fail", {"text": "the disk is gone", "rank": 1})
    assert (error.rank, error.error_type, error.message) == (1, "ValueError", "the disk is gone")
    assert error.traceback.rstrip().endswith("ValueError: the disk is gone")
    assert "in fail" in error.traceback


@pytest.mark.parametrize("another", [1, None], ids=["another type", "another text"])
def test_different_errors_at_one_check_point_are_not_one_error(pool: Pool, another: int | None) -> None:
    """They may have come before and after a collective; `failure` sees that the workers are ended."""
    assert failure(pool, "fail_apart", {"rank": another}).error_type in ("KeyError", "MemoryError")


def test_a_rank_killed_while_idle_costs_nothing_but_a_new_start(pool: Pool) -> None:
    pool.open()
    os.kill(pids(pool)[1], signal.SIGKILL)
    deadline = time.monotonic() + 5
    while pool.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not pool.alive
    arguments, result = RIGHT
    assert pool.submit("walk", arguments).result() == result


def test_ranks_that_do_not_stop_after_a_cancel_are_ended_and_shown(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "magi2")
    pool.open()
    job = pool.submit("hold", {"seconds": 60, "rank": 1})
    next(event for event in job.events() if isinstance(event, Progress))
    time.sleep(0.2)
    workers = pids(pool)
    start = time.monotonic()
    job.cancel()
    with pytest.raises(JobCancelledError, match=r"Rank 1 \(cpu, pid \d+\) did not stop within 1 s of the cancel"):
        job.result()
    assert 0.9 < time.monotonic() - start < 5
    assert "in hold" in caplog.text, "the log says where it hung"
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert warning.endswith("did not stop within 1 s of the cancel."), "one line for who pressed Ctrl-C"
    assert not [pid for pid in workers if running(pid)]


def test_a_second_cancel_does_not_wait_and_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Pool(PoolSpec(ENGINE, grace_seconds=60)) as pool:
        job = pool.submit("hold", {"seconds": 60})
        next(event for event in job.events() if isinstance(event, Progress))
        start = time.monotonic()
        job.cancel()
        time.sleep(0.3)
        assert not job.done
        job.cancel()
        with pytest.raises(JobCancelledError, match="second cancel"):
            job.result()
        assert time.monotonic() - start < 5
    (line,) = caplog.messages
    assert line.endswith("did not stop before the second cancel.")


def test_closing_a_pool_ends_the_job_and_the_workers() -> None:
    pool = Pool(PoolSpec(ENGINE, {}, TWO))
    job = pool.submit("walk", {"steps": 100_000, "seconds": 0.05})
    next(event for event in job.events() if isinstance(event, Progress))
    queued = pool.submit("echo")
    workers = pids(pool)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 3
    assert not [pid for pid in workers if running(pid)]
    for ended in (job, queued):
        with pytest.raises(PoolError, match="closed"):
            ended.result()
    with pytest.raises(PoolError, match="closed"):
        pool.submit("echo")
    pool.close()


def test_replicas_share_jobs_and_nothing_else() -> None:
    layout = ParallelLayout(dp=2)
    with Pool(PoolSpec(ENGINE, {}, layout)) as pool:
        pool.open()
        long = [pool.submit("walk", {"steps": 40, "seconds": 0.02}) for _ in range(2)]
        workers = pids(pool)
        time.sleep(0.2)
        assert [replica["state"] for replica in pool.status()["replicas"]] == ["busy", "busy"]
        assert [job.result() for job in long] == [{"total": 40 * 41 // 2 * 10}] * 2
        survivor = pool.submit("walk", {"steps": 40, "seconds": 0.02}, replica=0)
        with pytest.raises(RankError) as caught:
            pool.submit("die", {"how": "SIGKILL", "rank": 0}, replica=1).result()
        assert caught.value.rank == 1
        assert survivor.result()["total"] == 40 * 41 // 2 * 10
        assert pids(pool) == workers[:1]
        seen = pool.submit("where", replica=1).result()
        assert seen["pid"] not in workers
        assert (seen["rank"], seen["layout"], seen["ranks"]) == (1, "dp2", 1), "its place in the whole layout"
        assert pids(pool)[0] == workers[0]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"hang_at_start": 1}, r"Rank 1 \(cpu, pid \d+\) did not report within 10 s of the start"),
        ({"raise_at_start": 1}, r"Rank 1 .* raised CustomError while starting: no engine today"),
        ({"die_at_start": 1}, r"Rank 1 .* was killed by SIGKILL .*while starting"),
    ],
)  # fmt: skip
def test_a_start_that_fails_names_the_rank(
    plan: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "magi2")
    with Pool(PoolSpec(ENGINE, plan, TWO, start_seconds=10)) as pool:
        job = pool.submit("echo")
        with pytest.raises(RankError, match=message) as caught:
            job.result()
        assert caught.value.rank == 1
        assert not pids(pool)
        if "hang_at_start" in plan:
            assert "INFO rank 1 waits for nothing" in caught.value.log_lines
            assert caplog.messages == ["[rank 1] rank 1 waits for nothing"], "no job runs that could be told"


def test_an_engine_that_does_not_exist_is_named() -> None:
    with (
        Pool(PoolSpec("magi2_native.tests.no_such_module:make")) as pool,
        pytest.raises(RankError, match=r"raised ModuleNotFoundError while starting: .*no_such_module"),
    ):
        pool.open()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "nowhere"}, "'nowhere' does not name an engine"),
        ({"layout": TWO, "devices": ("cpu",)}, "Layout sp2 has 2 ranks, but 1 devices are given"),
        ({"layout": TWO, "devices": ("cuda:0", "cuda:7")}, r"\d CUDA devices are visible .*there is no 'cuda:\d'"),
        ({"devices": ("gpu0",)}, "there is no 'gpu0'"),
    ],
)  # fmt: skip
def test_a_description_that_cannot_start_is_refused_with_what_there_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolError, match=message):
        PoolSpec(**{"engine": ENGINE, **arguments})


def test_a_device_asked_for_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    PoolSpec(ENGINE, {}, TWO, ("cuda:1", "cuda:0"))
    with pytest.raises(PoolError, match=r"cuda:1 is given for 2 ranks.*\(cuda:0, cuda:1;"):
        PoolSpec(ENGINE, {}, TWO, ("cuda:1", "cuda:1"))


def test_messages_of_an_earlier_job_are_dropped(pool: Pool) -> None:
    """They cannot come from ranks that went through an end; this holds the second line of defence."""
    pool.open()
    job = pool.submit("walk", {"steps": 20, "seconds": 0.05})
    next(iter(job.events()))
    replica = pool._replicas[0]
    stale = {"job": job.number - 1, "outcome": "failed", "error": {"time": 0.0}, "checks": 0, "usable": True}
    replica._take(replica.ranks[0], {"kind": "end", **stale})
    progress = {"stage": "old", "step": 1, "total": 1}
    replica._take(replica.ranks[0], {"kind": "progress", "job": job.number - 1, "progress": progress})
    stages = {event.stage for event in job.events() if isinstance(event, Progress)}
    assert stages == {"walk"}
    assert job.result() == {"total": 20 * 21 // 2 * 10 * 2}


def test_an_ended_worker_is_explained() -> None:
    from magi2_native.distributed.process import describe_exit

    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(-9).startswith("was killed by SIGKILL (the kernel's out-of-memory killer")
    assert describe_exit(-11) == "was killed by SIGSEGV"
    assert describe_exit(-63) == "was killed by signal 63"
    assert describe_exit(None) == "closed its channel"


def test_the_pool_keeps_quiet(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool.open()
        pool.submit("walk", {"steps": 2}).result()
    assert not caplog.messages
