"""Where a request runs: an engine in this process, or a pool of worker processes. Both answer the same calls."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

from ..distributed.pool import Pool
from ..magi2_core.engine import make_engine
from ..magi2_core.events import Events
from ..magi2_core.memory.plan import Plan
from ..stages.session import pool_spec, run_on_pool


class Session(Protocol):
    """Runs engine calls (see Engine.run) one after the other; `plan` is what it was opened for."""

    @property
    def plan(self) -> Plan: ...

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        """Run one call and return its result; what `events.check` raises stops it and passes through."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class LocalSession:
    """One rank, in this process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._engine = make_engine(plan.to_dict())

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        return self._engine.run(call, arguments, events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


class PoolSession:
    """A pool of worker processes that lives as long as the session: started by the first call, or by torchrun before,
    and reached by the socket `launch`."""

    def __init__(self, plan: Plan, launch: str | None = None) -> None:
        self.plan = plan
        self._pool = Pool(pool_spec(plan, launch=launch))

    def run(self, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        return run_on_pool(self._pool, call, arguments, events)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.close()


def open_session(plan: Plan, launch: str | None = None) -> Session:
    """An engine in this process for one rank, a pool for more; the workers of a launch of torchrun, if it is given."""
    return LocalSession(plan) if len(plan.ranks) == 1 and launch is None else PoolSession(plan, launch)
