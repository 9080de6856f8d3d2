"""Tensors handed from one rank to others: results of a stage that not every rank computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from magi2_native.distributed.exchange import broadcast, broadcast_text, receive, send, smallest
from magi2_native.distributed.layout import LayoutError
from magi2_native.tests.ranks import counted_traffic, run_ranks
from torch import Tensor

GROUPS = [(0, 2), (1, 3)]


def own_group(rank: int) -> dist.ProcessGroup:
    groups = [dist.new_group(list(members)) for members in GROUPS]
    return groups[rank % 2]


def broadcast_in_groups(rank: int, dtype: torch.dtype) -> Tensor:
    return broadcast(torch.full((2, 3), float(rank), dtype=dtype), own_group(rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_every_rank_of_a_group_ends_with_what_its_first_rank_had(dtype: torch.dtype) -> None:
    for rank, result in enumerate(run_ranks(4, broadcast_in_groups, dtype)):
        assert torch.equal(result, torch.full((2, 3), float(rank % 2), dtype=dtype))


def sent_in_groups(rank: int) -> Tensor | None:
    """The second rank of each group sends a strided view to the first."""
    group = own_group(rank)
    frames = (torch.arange(24).view(2, 3, 4) + rank).to(torch.uint8).transpose(0, 1)
    if rank >= 2:
        send(frames, 0, group)
        return None
    return receive((3, 2, 4), torch.uint8, 1, group)


def test_ranks_of_a_group_are_counted_inside_the_group() -> None:
    results = run_ranks(4, sent_in_groups)
    for rank in (0, 1):
        assert torch.equal(results[rank], (torch.arange(24).view(2, 3, 4) + rank + 2).to(torch.uint8).transpose(0, 1))
    assert results[2:] == [None, None]


def test_a_rank_alone_keeps_what_it_has_and_nothing_empty_is_sent() -> None:
    x = torch.arange(3.0)
    assert broadcast(x, None) is x
    assert all(calls == [] for calls in run_ranks(2, empty_broadcast))


def empty_broadcast(rank: int) -> list[str]:
    with counted_traffic() as traffic:
        broadcast(torch.empty(0, 3), dist.group.WORLD)
        for call in (broadcast, lambda x, group: send(x, 0, group)):
            with pytest.raises(LayoutError, match="cannot exchange"):
                call(torch.zeros(2, dtype=torch.int16), dist.group.WORLD)
    return traffic.calls


TEXTS = ("", "a sentence: 5 \u20ac", "a name that is no text: \udcff.mp4")


def told_in_groups(rank: int) -> tuple[list[str], list[str]]:
    group = own_group(rank)
    with counted_traffic() as traffic:
        told = [broadcast_text(f"{text}{rank}" if text else "", group) for text in TEXTS]
    return told, traffic.calls


def test_every_rank_hears_the_first_ranks_text_as_bytes() -> None:
    for rank, (told, calls) in enumerate(run_ranks(4, told_in_groups)):
        assert told == ["", *(f"{text}{rank % 2}" for text in TEXTS[1:])]
        assert calls == ["broadcast"] * 5, "a pickle, or bytes of an empty text"
    assert broadcast_text("alone", None) == "alone"


def test_the_smallest_value_of_a_group_is_known_to_all_of_it() -> None:
    assert run_ranks(4, smallest_in_group) == [5, 6, 5, 6]
    assert smallest(7, None) == 7


def smallest_in_group(rank: int) -> int:
    return smallest(8 - rank if rank < 2 else 3 + rank, own_group(rank))
