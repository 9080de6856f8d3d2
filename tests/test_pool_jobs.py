"""Jobs on a pool of two ranks: results, events, order, stops at a common point, errors that the pool survives."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.distributed.pool import (
    Event,
    Job,
    JobCancelledError,
    LogLine,
    Memory,
    Pool,
    PoolError,
    PoolSpec,
    Progress,
    RankError,
    TransportError,
)  # fmt: skip
from magi2_native.distributed.transport import Packed
from magi2_native.distributed.worker import resident_bytes

ENGINE = "magi2_native.tests.pool_engines:make_engine"
# What another launcher and ComfyUI leave in the environment (60 §6.4).
FOREIGN = {
    "MASTER_ADDR": "198.51.100.1", "MASTER_PORT": "1", "RANK": "7", "LOCAL_RANK": "7", "WORLD_SIZE": "9",
    "GROUP_RANK": "3", "TORCHELASTIC_RUN_ID": "x", "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
    "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync,max_split_size_mb:128", "OF_THE_USER": "kept",
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Two ranks, started in the environment that another launcher left."""
    kept = dict(os.environ)
    os.environ.update(FOREIGN)
    try:
        spec = PoolSpec(ENGINE, {"a": (1, torch.ones(3))}, ParallelLayout(sp=2), preview_seconds=60, grace_seconds=8)
        with Pool(spec) as pool:
            yield pool.open()
    finally:
        os.environ.clear()
        os.environ.update(kept)


def pids(pool: Pool) -> list[int]:
    return [rank["pid"] for replica in pool.status()["replicas"] for rank in replica["ranks"]]


@pytest.fixture
def same_workers(pool: Pool) -> Iterator[None]:
    """The test must neither cost the pool its workers nor spoil the next job."""
    pool.open()
    before = pids(pool)
    assert len(before) == 2
    yield
    deadline = time.monotonic() + 30

    def poll() -> None:
        assert time.monotonic() < deadline, "the pool is still busy with the job of the test"

    assert pool.submit("walk", {"steps": 3}).result(poll=poll) == {"total": 3 * 4 // 2 * 10 * 2}
    assert pids(pool) == before


def collect(job: Any) -> tuple[dict[str, Any], list[Event]]:
    events: list[Event] = []
    return job.result(on_event=events.append), events


def test_values_and_tensors_reach_the_engine_and_come_back(pool: Pool) -> None:
    sent = {"x": torch.randn(300, 500), "small": torch.ones(2, dtype=torch.bfloat16), "plain": (1, [None, b"b"], "c")}
    back = pool.submit("echo", sent).result()
    assert torch.equal(back["x"], sent["x"])
    assert torch.equal(back["small"], sent["small"])
    assert back["plain"] == sent["plain"]


def test_a_result_belongs_to_the_caller_alone(pool: Pool) -> None:
    first = pool.submit("frames", {"count": 4, "height": 64, "width": 64}).result()["frames"]
    first.fill_(9)
    second = pool.submit("frames", {"count": 4, "height": 64, "width": 64}).result()["frames"]
    assert torch.equal(second.flatten(), (torch.arange(second.numel()) % 251).to(torch.uint8))


def test_arguments_are_taken_at_submit(pool: Pool) -> None:
    x = torch.zeros(100_000)
    blocking = pool.submit("walk", {"steps": 2, "seconds": 0.1})
    job = pool.submit("echo", {"x": x})
    x.fill_(1)
    assert job.result()["x"].sum() == 0
    blocking.result()


def test_workers_see_a_clean_environment_and_nothing_of_the_caller(pool: Pool) -> None:
    seen = pool.submit("where").result()
    environment = seen["environment"]
    assert environment["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"
    assert environment["OF_THE_USER"] == "kept"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    gone = set(FOREIGN) - {"PYTORCH_ALLOC_CONF", "OF_THE_USER"}
    assert not gone & set(environment)
    assert seen["arguments"] == ["magi2-worker"]
    assert not {"comfy", "server", "nodes", "folder_paths", "pytest", "magi2_native.nodes"} & set(seen["modules"])
    assert seen["ranks"] == 2
    assert seen["plan"]["a"][0] == 1
    assert os.environ["MASTER_ADDR"] == FOREIGN["MASTER_ADDR"], "the caller's own environment is not touched"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_listen_on_loopback_only(pool: Pool) -> None:
    pool.submit("where").result()
    sockets = {
        os.readlink(file).removeprefix("socket:[").removesuffix("]")
        for pid in pids(pool)
        for file in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(file).startswith("socket:")
    }
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state, inode = line.split()[1], line.split()[3], line.split()[9]
            if state == "0A" and inode in sockets:
                listening.append(local.split(":")[0])
    assert listening, "the rendezvous and gloo listen somewhere"
    assert set(listening) == {"0100007F"}


def test_n_steps_are_n_ticks_that_end_at_the_total(pool: Pool) -> None:
    result, events = collect(pool.submit("walk", {"steps": 12, "seconds": 0.02, "latents": True}))
    ticks = [event for event in events if isinstance(event, Progress)]
    assert result == {"total": 12 * 13 // 2 * 10 * 2}
    assert [(tick.stage, tick.step, tick.total) for tick in ticks] == [("walk", i, 12) for i in range(1, 13)]
    assert ticks[0].seconds_left is None
    assert ticks[-1].seconds_left == 0
    assert ticks[3].seconds_left is not None
    assert 0.1 < ticks[3].seconds_left < 10
    latents = [tick.latent for tick in ticks if tick.latent is not None]
    assert len(latents) == 1, "previews are rare: one in preview_seconds"
    assert torch.equal(latents[0], torch.ones(4, 2, 8, 8))


def test_every_rank_reports_its_memory(pool: Pool) -> None:
    _, events = collect(pool.submit("walk", {"steps": 1}))
    memory = {event.rank: event for event in events if isinstance(event, Memory)}
    assert set(memory) == {0, 1}
    assert all(50e6 < event.resident < 5e9 for event in memory.values())


def test_log_lines_of_a_job_reach_the_job_alone(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "magi2"):
        _, events = collect(pool.submit("talk", {"lines": 2}))
    lines = [(event.rank, event.level, event.text) for event in events if isinstance(event, LogLine)]
    of_rank_0 = [line for line in lines if line[0] == 0]
    assert of_rank_0 == [
        (0, "INFO", "line 0"), (0, "INFO", "line 1"), (0, "WARNING", "take care"), (0, "INFO", "for the user"),
    ]  # fmt: skip
    assert (1, "INFO", "line 1") in lines
    assert (1, "INFO", "for the user") not in lines, "one line for the user, not one for each rank"
    assert caplog.messages == [], "whoever runs the job logs them: each would be there twice"
    assert pool.status()["replicas"][0]["ranks"][1]["log"][-1] == "INFO for the user"


def test_events_are_delivered_in_the_callers_thread(pool: Pool) -> None:
    threads: set[int] = set()
    pool.submit("walk", {"steps": 2}).result(
        on_event=lambda _: threads.add(threading.get_ident()), poll=lambda: threads.add(threading.get_ident())
    )
    assert threads == {threading.get_ident()}


def test_poll_is_called_often_while_nothing_happens(pool: Pool) -> None:
    times: list[float] = []
    pool.submit("walk", {"steps": 1, "layers": 1, "seconds": 1.0}).result(poll=lambda: times.append(time.monotonic()))
    assert len(times) >= 6
    assert max(b - a for a, b in itertools.pairwise(times)) < 0.5


@pytest.mark.usefixtures("same_workers")
@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.4])
def test_cancel_stops_both_ranks_and_the_next_job_is_right(pool: Pool, seconds: float) -> None:
    job = pool.submit("walk", {"steps": 100_000, "seconds": seconds})
    next(event for event in job.events() if isinstance(event, Progress))
    start = time.monotonic()
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result()
    assert time.monotonic() - start < 2


@pytest.mark.usefixtures("same_workers")
@pytest.mark.parametrize("slow", [0, 1])
def test_cancel_meets_ranks_that_run_far_apart(pool: Pool, slow: int) -> None:
    """A stage that works on one rank only: the other has already passed all of its check points but the last."""
    job = pool.submit("apart", {"rank": slow, "checks": 40, "seconds": 0.02})
    time.sleep(0.3)
    job.cancel()
    assert job.result() == {"ranks": 2}, "no common check point was left, so the job ended in its own way"


@pytest.mark.usefixtures("same_workers")
def test_code_that_catches_every_exception_is_stopped_too(pool: Pool) -> None:
    job = pool.submit("swallow")
    time.sleep(0.2)
    start = time.monotonic()
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result()
    assert time.monotonic() - start < 2


class Interrupted(BaseException):
    """As ComfyUI's exception in newer versions; in older ones it is an Exception (60 §4)."""


@pytest.mark.usefixtures("same_workers")
@pytest.mark.parametrize("kind", [Interrupted, ValueError, SystemExit])
def test_what_poll_raises_cancels_the_job_and_passes_on_unchanged(pool: Pool, kind: type[BaseException]) -> None:
    raised = kind("pressed")
    until = time.monotonic() + 0.3

    def poll() -> None:
        if time.monotonic() > until:
            raise raised

    job = pool.submit("walk", {"steps": 100_000, "seconds": 0.05})
    with pytest.raises(kind) as caught:
        job.result(poll=poll)
    assert caught.value is raised
    assert job.done, "the ranks have stopped before the exception goes on"


@pytest.mark.usefixtures("same_workers")
def test_what_poll_raises_while_events_are_iterated_cancels_the_job_too(pool: Pool) -> None:
    calls: list[int] = []

    def poll() -> None:
        calls.append(1)
        if len(calls) > 3:
            raise Interrupted

    job = pool.submit("walk", {"steps": 100_000, "seconds": 0.05})
    with pytest.raises(Interrupted):
        list(job.events(poll))
    assert job.done


@pytest.mark.usefixtures("same_workers")
def test_what_on_event_raises_cancels_the_job_and_passes_on(pool: Pool) -> None:
    def show(event: Event) -> None:
        raise Interrupted

    job = pool.submit("walk", {"steps": 100_000, "seconds": 0.05})
    with pytest.raises(Interrupted):
        job.result(on_event=show)
    assert job.done


@pytest.mark.parametrize("source", ["poll", "on_event"])
def test_ranks_that_cannot_be_ended_are_waited_for_once(source: str) -> None:
    job = Job(1, "hang", None, Packed({}), lambda: None, patience=0.3)
    job.add_event(Progress("hang", 0, 1))

    def interrupt(*_: object) -> None:
        raise InterruptedError

    start = time.monotonic()
    with pytest.raises(InterruptedError):
        job.result(**{source: interrupt})
    assert 0.3 <= time.monotonic() - start < 0.55


@pytest.mark.usefixtures("same_workers")
def test_an_exception_in_the_block_of_a_job_cancels_it(pool: Pool) -> None:
    def listen(job: Job) -> None:
        with job:
            for event in job.events():
                if isinstance(event, Progress):
                    raise Interrupted

    job = pool.submit("walk", {"steps": 100_000, "seconds": 0.05})
    with pytest.raises(Interrupted):
        listen(job)
    assert job.done


@pytest.mark.usefixtures("same_workers")
def test_ctrl_c_stops_the_job_and_not_the_workers(pool: Pool) -> None:
    job = pool.submit("walk", {"steps": 100_000, "seconds": 0.05})
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        job.result()
    timer.join()
    assert job.done


@pytest.mark.usefixtures("same_workers")
def test_workers_do_not_hear_ctrl_c(pool: Pool) -> None:
    """A terminal sends it to every process of the group; only the client may act on it."""
    job = pool.submit("walk", {"steps": 20, "seconds": 0.02})
    next(event for event in job.events() if isinstance(event, Progress))
    for pid in pids(pool):
        os.kill(pid, signal.SIGINT)
    assert job.result()["total"] == 20 * 21 // 2 * 10 * 2


@pytest.mark.usefixtures("same_workers")
def test_a_queued_job_is_cancelled_without_a_rank_hearing_of_it(pool: Pool) -> None:
    running = pool.submit("walk", {"steps": 5, "seconds": 0.1})
    queued = pool.submit("fail", {"text": "it ran"})
    queued.cancel()
    with pytest.raises(JobCancelledError, match="before it began"):
        queued.result()
    running.result()


@pytest.mark.usefixtures("same_workers")
def test_a_late_cancel_does_not_hit_the_next_job(pool: Pool) -> None:
    job = pool.submit("echo", {"x": 1})
    assert job.result() == {"x": 1}
    job.cancel()
    assert pool.submit("walk", {"steps": 2}).result()["total"] == 60


@pytest.mark.usefixtures("same_workers")
def test_jobs_run_one_at_a_time_in_the_order_of_submission(pool: Pool) -> None:
    order: list[int] = []
    jobs = [pool.submit("walk", {"steps": 3, "seconds": 0.02}) for _ in range(4)]
    assert pool.status()["queued"] >= 2
    for i, job in enumerate(jobs):
        job.result()
        order.append(i)
        assert all(not later.done for later in jobs[i + 2 :])


@pytest.mark.usefixtures("same_workers")
def test_jobs_of_many_threads_all_end_and_get_their_own_results(pool: Pool) -> None:
    results: dict[int, Any] = {}

    def ask(i: int) -> None:
        results[i] = pool.submit("echo", {"i": i, "x": torch.full((50_000,), i)}).result()

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert {i: result["i"] for i, result in results.items()} == {i: i for i in range(12)}
    assert all(result["x"].unique().tolist() == [i] for i, result in results.items())


@pytest.mark.usefixtures("same_workers")
def test_an_error_of_all_ranks_is_told_once_and_the_pool_lives_on(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.submit("fail", {"text": "an odd number of frames"}).result()
    error, text = caught.value, str(caught.value)
    assert error.error_type == "ValueError"
    assert error.message == "an odd number of frames"
    assert error.survived
    assert "raised ValueError in 'fail': an odd number of frames" in text.splitlines()[0]
    assert "INFO about to fail" in error.log_lines
    assert text.index("Last log lines") < text.index("Traceback"), "the traceback comes last"
    assert "ended" not in text.split("Last log lines")[0]


@pytest.mark.usefixtures("same_workers")
def test_bad_requests_are_refused_before_any_rank_hears_of_them(pool: Pool) -> None:
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            pool.submit("echo", {"x": object()})
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in errors] == [TransportError] * 2
    assert "arguments.x is a object" in str(errors[0])
    with pytest.raises(PoolError, match="no replica 1"):
        pool.submit("echo", replica=1)


@pytest.mark.usefixtures("same_workers")
def test_a_job_goes_on_while_nobody_takes_its_events(pool: Pool) -> None:
    job = pool.submit("walk", {"steps": 300, "layers": 1})
    while not job.done:
        time.sleep(0.05)
    assert sum(isinstance(event, Progress) for event in job.events()) == 300
    assert job.result()["total"] == 300 * 301


def test_a_slow_listener_finds_the_newest_events_and_one_latent() -> None:
    job = Job(1, "walk", None, Packed({}), lambda: None, patience=1)
    for step in range(3000):
        job.add_event(Progress("walk", step, 3000, None, torch.full((2,), step)))
    job.finish({})
    events = [event for event in job.events() if isinstance(event, Progress)]
    assert [event.step for event in events] == list(range(1000, 3000))
    assert [event.latent.tolist() for event in events if event.latent is not None] == [[2999, 2999]]


@pytest.mark.usefixtures("same_workers")
def test_a_call_of_the_first_rank_alone_runs_fails_and_is_cancelled_without_harm(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    assert pool.submit("alone", {"steps": 3, "seconds": 0}).result() == {"steps": 3}
    with pytest.raises(RankError, match="alone") as caught:
        pool.submit("alone", {"steps": 3, "seconds": 0, "fail": True}).result()
    assert caught.value.survived
    job = pool.submit("alone", {"steps": 1000, "seconds": 0.05})
    next(event for event in job.events() if isinstance(event, Progress))
    job.cancel()
    with pytest.raises(JobCancelledError):
        job.result()
    assert not caplog.messages


def test_ranks_that_pass_different_numbers_of_check_points_are_reported(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    assert pool.submit("uneven").result() == {}
    assert "different numbers of check points in 'uneven' (rank 0: 1, rank 1: 2)" in caplog.text


def test_memory_kept_by_a_stage_is_seen_and_seen_to_go(pool: Pool) -> None:
    def resident() -> int:
        pool.submit("echo").result()
        time.sleep(0.1)
        return int(pool.status()["replicas"][0]["ranks"][1]["memory"]["resident"])

    before = resident()
    pool.submit("keep", {"megabytes": 300}).result()
    assert resident() - before > 280e6
    pool.submit("keep", {"megabytes": 0}).result()
    assert resident() - before < 20e6


def test_memory_is_flat_over_equal_runs_and_alternating_sizes(pool: Pool) -> None:
    """80 §14: ten equal runs, then two sizes by turns."""

    def resident(count: int) -> int:
        frames = pool.submit("frames", {"count": count, "height": 256, "width": 448}).result()["frames"]
        assert frames.max() == 250  # touched: what is only mapped is not resident
        pool.submit("echo").result()  # its report comes after the frames are free
        memory = [rank["memory"]["resident"] for rank in pool.status()["replicas"][0]["ranks"]]
        return max(memory) + resident_bytes()

    def growth(counts: list[int]) -> int:
        sizes = [resident(count) for count in counts]
        return max(sizes[2:]) - max(sizes[:2])

    assert growth([60] * 10) < 8e6
    assert growth([60, 20] * 5) < 8e6


def test_status_is_plain(pool: Pool) -> None:
    job = pool.submit("walk", {"steps": 10, "seconds": 0.05})
    next(iter(job.events()))
    status = pool.status()
    (replica,) = status["replicas"]
    assert (status["layout"], status["closed"], pool.alive) == ("sp2", False, True)
    assert (replica["state"], replica["job"]) == ("busy", {"number": job.number, "call": "walk"})
    assert [(rank["rank"], rank["device"], rank["device_name"]) for rank in replica["ranks"]] == [
        (0, "cpu", "CPU"), (1, "cpu", "CPU"),
    ]  # fmt: skip
    job.result()
