"""Process groups of a layout, and the harness that the tests of several ranks rest on."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from magi2_native.distributed import hosts, worker
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import LayoutError, ParallelLayout
from magi2_native.tests.ranks import counted_traffic, run_ranks

AXES = ("sp", "tp", "cfg", "replica")


def members(rank: int, layout: ParallelLayout) -> dict[str, list[int] | None]:
    context = ParallelContext.create(layout, rank)
    groups = {axis: getattr(context, f"{axis}_group") for axis in AXES}
    for group in groups.values():  # a group that cannot communicate is not a group
        if group is not None:
            dist.all_reduce(torch.zeros(1), group=group)
    return {axis: group and dist.get_process_group_ranks(group) for axis, group in groups.items()}


@pytest.mark.parametrize("text", ["sp4", "tp4", "tp2sp2", "cfg2sp2", "cfg2tp2", "dp2sp2", "dp4", "dp2cfg2"])
def test_every_rank_gets_its_own_group_on_each_axis_and_none_where_it_is_alone(text: str) -> None:
    layout = ParallelLayout.parse(text)
    for rank, groups in enumerate(run_ranks(layout.world, members, layout)):
        for axis in AXES:
            own = next(list(group) for group in layout.groups(axis) if rank in group)
            assert groups[axis] == (own if len(own) > 1 else None)


def groups_made(rank: int, layout: ParallelLayout) -> tuple[bool, bool]:
    context = ParallelContext.create(layout, rank)
    return context.sp_group is context.replica_group, context.sp_group is dist.group.WORLD


def test_axes_with_the_same_ranks_share_one_communicator() -> None:
    assert run_ranks(2, groups_made, ParallelLayout(sp=2)) == [(True, True)] * 2
    assert run_ranks(4, groups_made, ParallelLayout(sp=2, dp=2)) == [(True, False)] * 4


def refused(rank: int) -> list[str]:
    said = []
    for layout, claimed in ((ParallelLayout(sp=4), rank), (ParallelLayout(sp=2), 1 - rank)):
        with pytest.raises(LayoutError) as caught:
            ParallelContext.create(layout, claimed)
        said.append(str(caught.value))
    return said


def test_a_layout_of_another_world_is_refused() -> None:
    first, second = run_ranks(2, refused)
    assert "Layout sp4 has 4 ranks" in first[0]
    assert "should be rank 1" in first[1]
    assert "this is rank 1 of" not in second[1]


def test_a_process_alone_needs_no_process_group() -> None:
    context = ParallelContext.single()
    assert not dist.is_initialized()
    assert (context.layout.world, context.rank, context.split(7).counts) == (1, 0, (7,))
    assert context == ParallelContext.create(ParallelLayout(), 0)
    assert context.share(12, 256).banks.heads == 12


def test_a_context_splits_tokens_over_its_own_sequence_group() -> None:
    layout = ParallelLayout(sp=2, tp=2)
    context = ParallelContext(layout, 3, None, None, None, None)
    assert context.split(5).counts == (3, 2)
    assert context.split(5).rank == 1
    assert context.share(12, 256).banks.first_head == 6


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise KeyError("the cause")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def hang_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(30)


@pytest.mark.parametrize(
    ("function", "message"),
    [(fail_on_one, "Rank 1 failed:(?s:.*)the cause"), (die_on_one, "Rank 1 died"), (hang_on_one, r"\[.*1\] of 2 did")],
)
def test_a_rank_that_fails_dies_or_hangs_fails_the_test_that_started_it(function: object, message: str) -> None:
    before = time.monotonic()
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, function, deadline=2.0)
    assert time.monotonic() - before < 15


def some_traffic(rank: int) -> tuple[list[str], list[int]]:
    with counted_traffic() as traffic:
        dist.all_reduce(torch.zeros(3))
        dist.all_gather([torch.zeros(2) for _ in range(2)], torch.zeros(2))
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4))
        dist.all_gather_object([None, None], "size")
    dist.all_reduce(torch.zeros(3))  # no longer counted
    return traffic.calls, traffic.sent


def test_traffic_counts_every_collective_and_its_bytes() -> None:
    for calls, sent in run_ranks(2, some_traffic):
        assert calls[:3] == ["all_reduce", "all_gather", "all_to_all_single"]
        assert sent[:3] == [12, 8, 16]
        assert "all_gather_object" in calls


def test_a_ranks_device_is_the_one_that_its_launch_gave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On several hosts `cuda:1` is there many times, and rank 5 may have it."""
    device = torch.device("meta")
    layout = {"sp": 1, "tp": 1, "cfg": 1, "dp": 1, "experts": "banks"}
    assert worker._join({"layout": layout, "rank": 0, "number": 0}, device, None).device == device
    monkeypatch.setattr(hosts, "Mail", lambda: SimpleNamespace(rank=0))
    rank = hosts.HostRank(device)
    engine = "magi2_native.tests.pool_engines:make_engine"
    assert rank._begin({"layout": layout, "first": 0, "engine": engine, "plan": {}})["kind"] == "ready"
    assert rank._engine.parallel.device == device  # type: ignore[union-attr]
