"""How a call reaches the workers: what a pool starts with, and one call with its events."""

from __future__ import annotations

from typing import Any

from ..distributed.pool import Event, LogLine, Pool, PoolSpec, Progress, RankError
from ..distributed.remote import ask
from ..magi2_core.errors import named
from ..magi2_core.events import Events
from ..magi2_core.memory.machine import Place
from ..magi2_core.memory.plan import Plan

ENGINE = "magi2_native.magi2_core.engine:make_engine"
PLACE = "magi2_native.magi2_core.memory.machine:describe_place"


def pool_spec(plan: Plan, hidden_paths: tuple[str, ...] = (), launch: str | None = None) -> PoolSpec:
    """What a pool needs for a plan: to start workers, which do not see modules below `hidden_paths`, or to reach those
    of a launch of torchrun by its socket."""
    devices, sockets = (plan.devices, ()) if launch is None else ((), (launch,))
    return PoolSpec(
        engine=ENGINE, plan=plan.to_dict(), layout=plan.parallel, devices=devices, sockets=sockets,
        hidden_paths=hidden_paths,
    )  # fmt: skip


def launched_places(launch: str) -> tuple[Place, ...]:
    """The devices of workers that torchrun started, in rank order, by the socket of the first (docs/multi-node.md).

    PoolError if nobody answers there.
    """
    return tuple(Place(**found) for found in ask(launch, PLACE))


def run_on_pool(pool: Pool, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
    """Run one call, pass its events on, and return its result.

    Whatever `events` raises, in any of its methods, stops the job on all ranks first and then passes through. A
    sentence for the user comes back as the error it was, with the rank if that raised it alone; anything else is a
    RankError.
    """

    warnings: set[str] = set()

    def pass_on(event: Event) -> None:
        match event:
            case Progress():
                events.progress(event.stage, event.step, event.total, event.latent)
            # what all ranks say alike is heard once: of a replica's first rank, and warnings of any
            case LogLine() if event.level == "INFO" and event.rank % pool.spec.layout.replica == 0:
                events.log(event.text)
            case LogLine() if event.level != "INFO" and event.text not in warnings:
                warnings.add(event.text)
                events.log(event.text)

    try:
        return pool.submit(call, arguments).result(on_event=pass_on, poll=events.check)
    except RankError as error:
        kind = named(error.error_type)
        if kind is None:
            raise
        raise kind(error.message if error.survived else f"{error.sentence}{error.advice}") from error
