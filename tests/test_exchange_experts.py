"""MoE heads travel to the ranks that hold their experts and come back (10 §11.1, 70 §5)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from magi2_native.distributed.exchange import combine_heads, dispatch_heads
from magi2_native.distributed.layout import BankShare, TokenSplit, bank_shares
from magi2_native.tests.ranks import run_ranks
from magi2_native.tests.test_exchange_heads import SPLITS, values
from torch import Tensor


def dispatched(rank: int, x_TMd: Tensor, counts: tuple[int, ...], shares: tuple[BankShare, ...]) -> Tensor:
    split = TokenSplit(counts, rank)
    return dispatch_heads(x_TMd[split.rows], split, shares, dist.group.WORLD)


@pytest.mark.parametrize("mode", ["banks", "padded"])
@pytest.mark.parametrize("counts", SPLITS.values(), ids=SPLITS)
def test_a_rank_receives_all_tokens_of_the_heads_it_touches(counts: tuple[int, ...], mode: str) -> None:
    x_TMd = values(sum(counts), 6, 4, torch.bfloat16)
    shares = bank_shares(6, 4, 4, mode)
    expected = {"banks": [(0, 2), (1, 3), (3, 5), (4, 6)], "padded": [(0, 2), (2, 4), (4, 6), (6, 6)]}[mode]
    for received, (first, last) in zip(run_ranks(4, dispatched, x_TMd, counts, shares), expected, strict=True):
        assert torch.equal(received, x_TMd[:, first:last])


def scaled_by_banks(rank: int, x_TMd: Tensor, counts: tuple[int, ...], shares: tuple[BankShare, ...]) -> Tensor:
    """An expert layer whose bank b adds weight[b] times the token: each rank adds what its own banks give."""
    split, share = TokenSplit(counts, rank), shares[rank]
    weight_ME = torch.arange(1.0, 1 + x_TMd.shape[1] * share.experts).view(-1, share.experts)
    own_ME = torch.zeros_like(weight_ME)
    own_ME.view(-1)[share.first_bank : share.last_bank] = weight_ME.view(-1)[share.first_bank : share.last_bank]
    x_Thd = dispatch_heads(x_TMd[split.rows], split, shares, dist.group.WORLD)
    y_Thd = x_Thd * own_ME.sum(1)[share.first_head : share.last_head, None]
    return combine_heads(y_Thd, split, shares, dist.group.WORLD)


@pytest.mark.parametrize("mode", ["banks", "padded"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_parts_of_a_shared_head_add_up_on_the_way_back(ranks: int, mode: str) -> None:
    counts = (4, 0, 3, 1, 2, 2, 1, 1)[:ranks]
    for heads, experts in ((12, 4), (2, 8)):  # two heads on many ranks: a head has more than two owners
        x_TMd = values(sum(counts), heads, 3, torch.float32)
        weight_M = torch.arange(1.0, 1 + heads * experts).view(heads, experts).sum(1)
        results = run_ranks(ranks, scaled_by_banks, x_TMd, counts, bank_shares(heads, experts, ranks, mode))
        assert torch.equal(torch.cat(results), x_TMd * weight_M[:, None])


def combined_halves(rank: int, parts: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    split = TokenSplit((1,) * len(parts), rank)
    shares = bank_shares(1, len(parts), len(parts))
    return combine_heads(torch.full((len(parts), 1, 1), parts[rank], dtype=dtype), split, shares, dist.group.WORLD)


def test_parts_are_added_in_fp32_and_rounded_once() -> None:
    # In bf16, 256 + 1 is 256 again: added one by one the two ones would be lost, together they are kept.
    for total in run_ranks(3, combined_halves, (256.0, 1.0, 1.0), torch.bfloat16):
        assert total.dtype == torch.bfloat16
        assert total.item() == 258.0


def test_a_head_with_one_owner_comes_back_unchanged() -> None:
    for total in run_ranks(2, sole_owner):
        assert torch.isnan(total[0, 0, 0])
        assert total[0, 1, 0] == -0.0
        assert torch.signbit(total[0, 1, 0])


def sole_owner(rank: int) -> Tensor:
    y = torch.tensor([float("nan"), -0.0]).view(1, 2, 1)
    split, shares = TokenSplit((1, 1), rank), bank_shares(2, 2, 2)
    return combine_heads(y[:, rank : rank + 1].expand(2, 1, 1), split, shares, dist.group.WORLD)
