"""The pool manager: status without waiting, refusals while a job runs, and stopping when idle."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import magi2_native.distributed.pool as pool_module
import pytest
from magi2_native.magi2_core.errors import DeviceMemoryError, RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.memory.plan import Plan, RankPlan
from magi2_native.stages.manager import PoolManager
from magi2_native.stages.values import Model
from magi2_native.tests.comfy_stub.fake_pool import FakePool

MODEL = Model("mini", Plan("/secret/place", "sp2", "bfloat16", "keep", "float32", (RankPlan("cpu", 1, 2, 3),) * 2), ())
REQUEST = {"prompt": "x", "negative_prompt": "", "figures": []}


@pytest.fixture
def pools() -> list[FakePool]:
    return []


@pytest.fixture
def manager(pools: list[FakePool]) -> PoolManager:
    def make(model: Model) -> Any:
        pools.append(FakePool(model, pool_module))
        return pools[-1]

    return PoolManager(make)


def run(manager: PoolManager, model: Model = MODEL) -> dict[str, Any]:
    return manager.run(model, "encode_text", dict(REQUEST), Silent())


def test_nothing_starts_before_the_first_run(manager: PoolManager, pools: list[FakePool]) -> None:
    assert manager.status()["state"] == "stopped"
    assert pools == []
    assert not manager.stop()
    assert not manager.unload()
    with pytest.raises(RequestError, match="No model has been used"):
        manager.start()


def test_the_status_follows_the_pool_and_tells_no_paths(manager: PoolManager, pools: list[FakePool]) -> None:
    run(manager)
    status = manager.status()
    assert (status["state"], status["model"], status["layout"]) == ("ready", "mini", "sp2")
    assert [rank["device"] for rank in status["ranks"]] == ["cpu", "cpu"]
    assert status["log"] == ["encode_text is done"]
    assert "/secret" not in str(status)
    manager.unload()
    assert manager.status()["state"] == "unloaded"
    manager.stop()
    assert manager.status()["state"] == "stopped"
    manager.start()
    assert manager.status()["state"] == "ready"
    pools[-1].alive = False
    assert manager.status()["state"] == "stopped"


def test_status_answers_and_stop_is_refused_while_a_job_runs(manager: PoolManager, pools: list[FakePool]) -> None:
    running, finish = threading.Event(), threading.Event()
    run(manager)

    def hold(call: str) -> None:
        running.set()
        finish.wait(10)

    pools[0].on_call = hold
    worker = threading.Thread(target=run, args=(manager,))
    worker.start()
    try:
        assert running.wait(5)
        assert manager.status()["state"] == "busy"
        assert manager.status()["progress"]["stage"] == "encode_text"
        with pytest.raises(RequestError, match="middle of a job"):
            manager.stop(0.05)
        with pytest.raises(RequestError, match="middle of a job"):
            manager.unload(0.05)
    finally:
        finish.set()
        worker.join(10)
    assert manager.stop(1)


def test_the_status_shows_a_new_stage_at_once(manager: PoolManager) -> None:
    from magi2_native.stages.manager import _Watched

    events = _Watched(Silent(), manager)
    events.progress("load", 106, 106)
    events.progress("sample", 0, 2)
    assert manager.status()["progress"] == {"stage": "sample", "done": 0, "total": 2}


def test_cancel_is_heard_while_the_panel_starts_workers(manager: PoolManager, pools: list[FakePool]) -> None:
    class Cancelled(Silent):
        def check(self) -> None:
            raise KeyboardInterrupt

    starting, finish = threading.Event(), threading.Event()
    run(manager)
    manager.stop()
    manager.before_start = lambda model: (starting.set(), finish.wait(10))
    panel = threading.Thread(target=manager.start)
    panel.start()
    try:
        assert starting.wait(5)
        with pytest.raises(KeyboardInterrupt):
            manager.run(MODEL, "encode_text", dict(REQUEST), Cancelled())
        assert not finish.is_set()
    finally:
        finish.set()
        panel.join(10)
    run(manager)


def test_jobs_from_several_threads_run_one_after_the_other(manager: PoolManager, pools: list[FakePool]) -> None:
    active: list[int] = []

    def watch(call: str) -> None:
        active.append(1)
        assert len(active) == 1
        time.sleep(0.01)
        active.pop()

    run(manager)
    pools[0].on_call = watch
    failures: list[BaseException] = []

    def safe() -> None:
        try:
            run(manager)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=safe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not failures
    assert len(pools) == 1


def test_idle_workers_are_stopped_after_the_set_time_and_busy_ones_are_not(
    manager: PoolManager, pools: list[FakePool]
) -> None:
    manager.idle_minutes = 0.2 / 60
    run(manager)
    time.sleep(0.1)
    run(manager)  # starts the clock anew
    manager._stop_if_idle(manager.runs - 1)  # the first clock, had it rung at this very moment
    assert manager.alive
    time.sleep(0.15)
    assert manager.alive
    deadline = time.monotonic() + 5
    while manager.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not manager.alive
    assert pools[0].closed == 1


@pytest.mark.parametrize("restarted", [False, True], ids=["after a job", "after a start"])
def test_a_time_that_is_set_holds_for_workers_that_are_idle_already(manager: PoolManager, restarted: bool) -> None:
    run(manager)
    if restarted:
        manager.stop()
        manager.idle_minutes = 0.05 / 60
        manager.start()
    else:
        manager.stop_when_idle(0.05 / 60)
    deadline = time.monotonic() + 5
    while manager.alive and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not manager.alive


def test_a_time_that_is_taken_back_lets_idle_workers_stay(manager: PoolManager) -> None:
    manager.idle_minutes = 0.1 / 60
    run(manager)
    manager.stop_when_idle(0)
    time.sleep(0.2)
    assert manager.alive


def test_without_a_set_time_workers_stay(manager: PoolManager) -> None:
    before = threading.active_count()
    run(manager)
    assert threading.active_count() == before


def test_the_hooks_of_a_start_and_of_a_first_job_see_the_model(manager: PoolManager) -> None:
    seen: list[str] = []
    manager.before_start = lambda model: seen.append(f"start {model.name}")
    manager.before_job = lambda model: seen.append(f"job {model.name}")
    run(manager)
    run(manager)
    assert seen == ["start mini", "job mini"]
    manager.stop()
    manager.start()
    assert seen == ["start mini", "job mini", "start mini"]
    run(manager)
    assert seen == ["start mini", "job mini", "start mini", "job mini"]


def test_workers_whose_first_job_was_not_begun_are_stopped_when_idle_too(manager: PoolManager) -> None:
    def fail(_: Model) -> None:
        raise MemoryError

    manager.idle_minutes = 0.05 / 60
    manager.before_job = fail
    with pytest.raises(MemoryError):
        run(manager)
    deadline = time.monotonic() + 5
    while manager.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not manager.alive


def test_a_sentence_of_the_engine_comes_back_as_the_error_it_was(manager: PoolManager, pools: list[FakePool]) -> None:
    run(manager)

    class Refusing:
        def result(self, **_: Any) -> Any:
            raise pool_module.RankError(
                "Rank 0 raised.", rank=0, error_type="CheckpointError", message="shard 3 is cut short", survived=True
            )

    pools[0].submit = lambda call, arguments: Refusing()  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ValueError, match=r"^shard 3 is cut short$"):
        run(manager)


def test_a_sentence_of_one_rank_alone_names_it_and_says_what_became_of_the_workers(
    manager: PoolManager, pools: list[FakePool]
) -> None:
    run(manager)
    told = {"rank": 1, "error_type": "DeviceMemoryError", "message": "cuda:1 ran out", "traceback": "Traceback: x"}
    error = pool_module.RankError("Rank 1 raised DeviceMemoryError in 'sample': cuda:1 ran out", **told)
    failing = SimpleNamespace(result=lambda **_: (_ for _ in ()).throw(error))
    pools[0].submit = lambda call, arguments: failing  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(DeviceMemoryError) as caught:
        run(manager)
    assert str(caught.value) == f"{error.sentence}\nThe workers were ended; the next run starts new ones."
    assert caught.value.__cause__ is error, "its traceback is for the log"


def test_other_errors_of_a_rank_keep_their_report(manager: PoolManager, pools: list[FakePool]) -> None:
    run(manager)
    error = pool_module.RankError("Rank 1 raised.", rank=1, error_type="RuntimeError", traceback="Traceback: x")
    failing = SimpleNamespace(result=lambda **_: (_ for _ in ()).throw(error))
    pools[0].submit = lambda call, arguments: failing  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(pool_module.RankError, match=r"(?s)Rank 1 raised.*Traceback: x$"):
        run(manager)


def test_what_ranks_say_is_heard_once(manager: PoolManager, pools: list[FakePool]) -> None:
    heard: list[str] = []

    class Hearing(Silent):
        def log(self, text: str) -> None:
            heard.append(text)

    run(manager)
    said = [(0, "INFO", "read"), (1, "INFO", "read"), (1, "WARNING", "a stray"), (0, "WARNING", "a stray"),
            (1, "WARNING", "of mine")]  # fmt: skip
    pools[0].lines = [pool_module.LogLine(*line) for line in said]
    manager.run(MODEL, "encode_text", dict(REQUEST), Hearing())
    assert heard == ["read", "a stray", "of mine", "encode_text is done"]
