"""Exchanges between tokens and heads on real gloo ranks, against exact values (10 §11.1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from magi2_native.distributed import exchange
from magi2_native.distributed.layout import LayoutError, TokenSplit, bank_shares
from magi2_native.tests.ranks import counted_traffic, run_ranks
from torch import Tensor

SPLITS = {
    "even": (3, 3, 3, 3),
    "uneven": (4, 3, 3, 3),
    "lopsided": (1, 7, 2, 5),
    "one_empty": (4, 0, 3, 1),
    "all_but_one_empty": (0, 0, 5, 0),
    "all_empty": (0, 0, 0, 0),
}
GROUPS = {
    "world": [(0, 1, 2, 3)],
    "contiguous": [(0, 1), (2, 3)],
    "non_contiguous": [(0, 2), (1, 3)],
    "outer_and_inner": [(0, 3), (1, 2)],
}


def values(tokens: int, heads: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Different numbers everywhere, exact in every dtype up to 8 significant bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (tokens, heads, width), generator=generator).to(dtype)


def in_own_group(rank: int, partition: list[tuple[int, ...]], check: Callable[..., None], *arguments: object) -> None:
    """Make every group of a partition of the ranks and run `check(group, members, index)` in this rank's own."""
    groups = [dist.group.WORLD if len(members) == 4 else dist.new_group(list(members)) for members in partition]
    for members, group in zip(partition, groups, strict=True):
        if rank in members:
            check(group, members, members.index(rank), *arguments)


def qkv_round_trip(group: dist.ProcessGroup, members: tuple[int, ...], index: int, dtype: torch.dtype) -> None:
    ranks = len(members)
    for counts in SPLITS.values():
        split = TokenSplit(counts[:ranks], index)
        # Groups that work at the same time carry different numbers, so that a wrong group shows.
        q, k, v = (values(split.total, heads, 6, dtype, seed=10 * members[0] + i) for i, heads in enumerate((8, 4, 4)))
        received = exchange.scatter_qkv(q[split.rows], k[split.rows], v[split.rows], split, group)
        for whole, part in zip((q, k, v), received, strict=True):
            heads = whole.shape[1] // ranks
            assert torch.equal(part, whole[:, index * heads : (index + 1) * heads])
        alone = exchange.scatter_heads_gather_tokens(q[split.rows], split, group)
        assert torch.equal(alone, received[0])
        back = exchange.scatter_tokens_gather_heads(received[0], split, group)
        assert torch.equal(back, q[split.rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("partition", GROUPS.values(), ids=GROUPS)
def test_heads_scatter_and_tokens_gather_exactly_for_every_partition_and_group(
    partition: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    run_ranks(4, in_own_group, partition, qkv_round_trip, dtype)


def gather_rows(group: dist.ProcessGroup, members: tuple[int, ...], index: int) -> None:
    for counts in SPLITS.values():
        split = TokenSplit(counts[: len(members)], index)
        x_TC = values(split.total, 1, 5, torch.float32, seed=members[0])[:, 0]
        assert torch.equal(exchange.gather_tokens(x_TC[split.rows], split, group), x_TC)
        cube = values(split.total, 2, 5, torch.bfloat16, seed=members[0])
        assert torch.equal(exchange.gather_tokens(cube[split.rows], split, group), cube)


@pytest.mark.parametrize("partition", GROUPS.values(), ids=GROUPS)
def test_rows_gather_in_rank_order_for_every_partition_and_group(partition: list[tuple[int, ...]]) -> None:
    run_ranks(4, in_own_group, partition, gather_rows)


def strided_inputs(rank: int) -> None:
    split = TokenSplit((4, 3, 3, 3), rank)
    qkv = values(split.total, 12, 6, torch.bfloat16)
    parts = qkv[split.rows].split([4, 4, 4], dim=1)  # views of one projection, as in the model
    for i, part in enumerate(exchange.scatter_qkv(*parts, split, dist.group.WORLD)):
        assert torch.equal(part, qkv[:, 4 * i + rank : 4 * i + rank + 1])
    back = exchange.scatter_tokens_gather_heads(part, split, dist.group.WORLD)
    assert torch.equal(back, qkv[split.rows, 8:])
    transposed = values(4, split.total, 6, torch.bfloat16).transpose(0, 1)
    assert torch.equal(exchange.gather_tokens(transposed[split.rows], split, dist.group.WORLD), transposed)


def test_strided_views_are_exchanged_like_contiguous_tensors() -> None:
    run_ranks(4, strided_inputs)


def repeated_kv(rank: int) -> None:
    split = TokenSplit((4, 3, 3, 3), rank)
    q, k, v = (values(split.total, heads, 6, torch.float32, seed) for seed, heads in enumerate((8, 2, 2)))
    q_THd, k_THd, v_THd = exchange.scatter_qkv(q[split.rows], k[split.rows], v[split.rows], split, dist.group.WORLD)
    assert torch.equal(q_THd, q[:, 2 * rank : 2 * rank + 2])
    # Query heads 2r and 2r+1 belong to key/value head (2r) // 4 = r // 2.
    assert torch.equal(k_THd, k[:, rank // 2 : rank // 2 + 1])
    assert torch.equal(v_THd, v[:, rank // 2 : rank // 2 + 1])


def test_a_kv_head_goes_to_every_rank_whose_query_heads_use_it() -> None:
    run_ranks(4, repeated_kv)


def traffic_of_exchanges(rank: int, counts: tuple[int, ...]) -> tuple[list[str], list[int]]:
    split, group = TokenSplit(counts, rank), dist.group.WORLD
    q, k, v = (torch.zeros(split.local, heads, 16, dtype=torch.bfloat16) for heads in (8, 4, 4))
    shares = bank_shares(6, 4, 4)
    with counted_traffic() as traffic:
        q_THd, _, _ = exchange.scatter_qkv(q, k, v, split, group)
        exchange.scatter_tokens_gather_heads(q_THd, split, group)
        exchange.combine_heads(exchange.dispatch_heads(q[:, :6], split, shares, group), split, shares, group)
        exchange.gather_tokens(q, split, group)
    return traffic.calls, traffic.sent


def test_each_exchange_is_one_collective_and_none_is_about_sizes() -> None:
    counts = (4, 0, 3, 1)
    for rank, (calls, sent) in enumerate(run_ranks(4, traffic_of_exchanges, counts)):
        assert calls == ["all_to_all_single"] * 4 + ["all_gather_single"]
        touched = [share.heads for share in bank_shares(6, 4, 4)]
        assert touched == [2, 2, 2, 2]
        assert sent == [
            counts[rank] * (8 + 4 + 4) * 16 * 2,
            sum(counts) * 2 * 16 * 2,
            counts[rank] * sum(touched) * 16 * 2,
            sum(counts) * touched[rank] * 16 * 2,
            max(counts) * 8 * 16 * 2,
        ]


def test_a_globally_empty_exchange_sends_nothing() -> None:
    for calls, _ in run_ranks(4, traffic_of_exchanges, (0, 0, 0, 0)):
        assert calls == []


def traffic_of_refused(rank: int) -> list[tuple[str, str]]:
    """What each bad call says; no rank communicates, so that none waits for another."""
    world = dist.group.WORLD
    even, odd = TokenSplit((3, 3, 3, 3), rank), TokenSplit((4, 3, 3, 3), (rank + 1) % 4)
    q, k = torch.zeros(3, 8, 4), torch.zeros(3, 4, 4)
    shares = bank_shares(8, 4, 4)
    bad: dict[str, Callable[[], object]] = {
        "a split of another rank": lambda: exchange.scatter_heads_gather_tokens(q, odd, world),
        "a split of another group size": lambda: exchange.gather_tokens(q, TokenSplit((3,), 0), world),
        "a group for a split of several ranks": lambda: exchange.gather_tokens(q, even, None),
        "wrong tokens": lambda: exchange.scatter_qkv(q, k[:2], k[:2], even, world),
        "all tokens where own are expected": lambda: exchange.gather_tokens(torch.zeros(12, 4), even, world),
        "own tokens where all are expected": lambda: exchange.scatter_tokens_gather_heads(q, even, world),
        "a missing axis": lambda: exchange.scatter_heads_gather_tokens(q[:, 0], even, world),
        "heads that do not divide": lambda: exchange.scatter_heads_gather_tokens(q[:, :6], even, world),
        "kv heads that do not divide": lambda: exchange.scatter_qkv(q, k[:, :3], k[:, :3], even, world),
        "mixed dtypes": lambda: exchange.scatter_qkv(q, k.bfloat16(), k, even, world),
        "mixed widths": lambda: exchange.scatter_qkv(q, k[..., :2], k[..., :2], even, world),
        "k and v with different heads": lambda: exchange.scatter_qkv(q, k, q, even, world),
        "a dtype that gloo refuses": lambda: exchange.scatter_heads_gather_tokens(q.short(), even, world),
        "a reduction of that dtype": lambda: exchange.all_reduce_sum(q.short(), world),
        "shares for other ranks": lambda: exchange.dispatch_heads(q, even, bank_shares(8, 4, 2), world),
        "shares for other heads": lambda: exchange.dispatch_heads(q[:, :6], even, shares, world),
        "results with other heads": lambda: exchange.combine_heads(torch.zeros(12, 3, 4), even, shares, world),
        "results for own tokens only": lambda: exchange.combine_heads(torch.zeros(3, 2, 4), even, shares, world),
    }
    said = []
    with counted_traffic() as traffic:
        for what, call in bad.items():
            try:
                call()
                said.append((what, ""))
            except LayoutError as error:
                said.append((what, str(error)))
    assert traffic.calls == []
    return said


def test_what_does_not_fit_is_refused_with_a_sentence_before_anything_is_sent() -> None:
    for said in run_ranks(4, traffic_of_refused):
        for what, sentence in said:
            assert sentence.endswith((".", "group.")), f"{what} was accepted"
            assert any(character.isdigit() or "torch." in sentence for character in sentence), sentence


def test_every_exchange_is_the_identity_without_a_group() -> None:
    split, shares = TokenSplit((5,), 0), bank_shares(6, 4, 1)
    x = values(5, 6, 4, torch.bfloat16)
    assert exchange.scatter_heads_gather_tokens(x, split, None) is x
    assert exchange.scatter_tokens_gather_heads(x, split, None) is x
    assert all(part is x for part in exchange.scatter_qkv(x, x, x, split, None))
    assert exchange.dispatch_heads(x, split, shares, None) is x
    assert exchange.combine_heads(x, split, shares, None) is x
    assert exchange.gather_tokens(x, split, None) is x
    assert exchange.all_reduce_sum(x, None) is x


def reduced(rank: int, dtype: torch.dtype) -> Tensor:
    return exchange.all_reduce_sum(torch.full((2, 3), float(2**rank), dtype=dtype), dist.group.WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_reduce_adds_the_ranks(dtype: torch.dtype) -> None:
    for result in run_ranks(4, reduced, dtype):
        assert torch.equal(result, torch.full((2, 3), 15.0, dtype=dtype))
