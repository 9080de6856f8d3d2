"""Where a request runs: an engine in this process, or a pool of worker processes. Both answer the same calls."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

from ..distributed.pool import LogLine, Pool, PoolSpec, Progress
from ..magi2_core.engine import make_engine
from ..magi2_core.events import Events
from ..magi2_core.memory.plan import Plan

ENGINE = "magi2_native.magi2_core.engine:make_engine"


class Session(Protocol):
    """Runs engine calls (see Engine.run) one after the other."""

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        """Run one call and return its result; what `events.check` raises stops it and passes through."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class LocalSession:
    """One rank, in this process."""

    def __init__(self, plan: Plan) -> None:
        self._engine = make_engine(plan.to_dict())

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        return self._engine.run(call, arguments, events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class PoolSession:
    """A pool of worker processes that lives as long as the session."""

    def __init__(self, plan: Plan) -> None:
        self._pool = Pool.start(pool_spec(plan))

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        return run_on_pool(self._pool, call, arguments, events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.close()


def pool_spec(plan: Plan) -> PoolSpec:
    """What a pool needs to start for a plan."""
    return PoolSpec(engine=ENGINE, plan=plan.to_dict(), layout=plan.parallel, devices=plan.devices)


def run_on_pool(pool: Pool, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
    """Submit one call and pass its events on, until its result is there."""
    job = pool.submit(call, arguments)
    for event in job.events(poll=events.check):
        match event:
            case Progress():
                events.progress(event.stage, event.step, event.total, event.latent)
            case LogLine():
                events.log(event.text)
    return job.result()


def open_session(plan: Plan) -> Session:
    """An engine in this process for one rank, a pool for more."""
    return LocalSession(plan) if len(plan.ranks) == 1 else PoolSession(plan)
