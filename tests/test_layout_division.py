"""How ranks, tokens, heads and expert banks divide (10 §11, 70 §5)."""

from __future__ import annotations

import pytest
from magi2_native.distributed.layout import (
    BankShare,
    LayoutError,
    ModelShape,
    ParallelLayout,
    Position,
    TokenSplit,
    bank_shares,
    check_layout,
    legal_layouts,
    split_evenly,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12, 24])
def test_tokens_divide_contiguously_and_none_is_lost(ranks: int) -> None:
    for total in (0, 1, 5, 48, 51, 7501):
        splits = [TokenSplit.even(total, ranks, rank) for rank in range(ranks)]
        rows = [index for split in splits for index in range(total)[split.rows]]
        assert rows == list(range(total))
        assert all(split.total == total for split in splits)
        assert max(split.local for split in splits) - min(split.local for split in splits) <= 1


def test_the_first_ranks_hold_the_remaining_tokens() -> None:
    assert split_evenly(13, 4) == (4, 3, 3, 3)
    assert split_evenly(2, 4) == (1, 1, 0, 0)
    assert split_evenly(0, 3) == (0, 0, 0)


@pytest.mark.parametrize(("counts", "rank"), [((3, 3), 2), ((3, 3), -1), ((), 0), ((3, -1), 0)])
def test_a_split_that_cannot_be_is_refused(counts: tuple[int, ...], rank: int) -> None:
    with pytest.raises(LayoutError, match=r"\.$"):
        TokenSplit(counts, rank)
    with pytest.raises(LayoutError, match="at least one part"):
        split_evenly(4, 0)


def test_eight_ranks_hold_one_and_a_half_heads_each() -> None:
    shares = bank_shares(12, 256, 8)
    assert [share.banks for share in shares] == [384] * 8
    assert [(share.first_head, share.last_head) for share in shares] == [
        (0, 2), (1, 3), (3, 5), (4, 6), (6, 8), (7, 9), (9, 11), (10, 12)
    ]  # fmt: skip
    assert sum(share.heads for share in shares) == 16  # the padded form sends 16 heads, too


def test_padding_to_whole_heads_leaves_the_last_ranks_without_any() -> None:
    shares = bank_shares(12, 256, 8, "padded")
    assert [(share.first_bank, share.last_bank) for share in shares[:6]] == [(512 * r, 512 * r + 512) for r in range(6)]
    assert [share.heads for share in shares] == [2] * 6 + [0, 0]
    # 10 §11.1: with 5 or 7 ranks only the last has none
    assert [share.heads for share in bank_shares(12, 256, 5, "padded")] == [3, 3, 3, 3, 0]
    assert [share.heads for share in bank_shares(12, 256, 7, "padded")] == [2] * 6 + [0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_both_divisions_are_the_same_where_ranks_divide_heads(ranks: int) -> None:
    assert bank_shares(12, 256, ranks, "banks") == bank_shares(12, 256, ranks, "padded")


@pytest.mark.parametrize("mode", ["banks", "padded"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24])
def test_every_bank_has_exactly_one_owner(ranks: int, mode: str) -> None:
    for heads, experts in ((12, 256), (6, 8), (1, 5), (0, 1)):
        shares = bank_shares(heads, experts, ranks, mode)
        owned = [bank for share in shares for bank in range(share.first_bank, share.last_bank)]
        assert owned == list(range(heads * experts))
        for share in shares:
            touched = {bank // experts for bank in range(share.first_bank, share.last_bank)}
            assert touched == set(range(share.first_head, share.last_head))
    if mode == "banks":
        counts = [share.banks for share in bank_shares(12, 256, ranks)]
        assert max(counts) - min(counts) <= 1


def test_a_share_without_banks_touches_no_head() -> None:
    share = BankShare(3072, 3072, 256)
    assert (share.banks, share.heads, share.first_head, share.last_head) == (0, 0, 12, 12)
    assert BankShare(300, 300, 256).heads == 0


def test_ranks_are_numbered_with_tensor_parallelism_innermost() -> None:
    layout = ParallelLayout(sp=2, tp=2, cfg=2, dp=2)
    assert layout.world == 16
    assert [layout.position(rank) for rank in (0, 1, 2, 4, 8, 15)] == [
        Position(0, 0, 0, 0), Position(0, 0, 0, 1), Position(0, 0, 1, 0), Position(0, 1, 0, 0), Position(1, 0, 0, 0),
        Position(1, 1, 1, 1),
    ]  # fmt: skip
    with pytest.raises(LayoutError, match="ranks 0 to 15"):
        layout.position(16)


def test_tensor_groups_are_neighbours_and_sequence_groups_stride() -> None:
    layout = ParallelLayout(sp=2, tp=2)  # the four ranks of 10 §11.2
    assert layout.groups("tp") == [(0, 1), (2, 3)]
    assert layout.groups("sp") == [(0, 2), (1, 3)]
    assert layout.groups("cfg") == [(0,), (1,), (2,), (3,)]
    both = ParallelLayout(sp=2, cfg=2, dp=2)
    assert both.groups("cfg") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert both.groups("replica") == [(0, 1, 2, 3), (4, 5, 6, 7)]


@pytest.mark.parametrize("axis", ["tp", "sp", "cfg", "replica"])
def test_the_groups_of_an_axis_hold_every_rank_once(axis: str) -> None:
    layout = ParallelLayout(sp=3, tp=2, cfg=2, dp=2)
    groups = layout.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert {len(group) for group in groups} == {layout.replica if axis == "replica" else getattr(layout, axis)}


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("sp4", ParallelLayout(sp=4)),
        ("sp1", ParallelLayout()),
        ("TP2SP2", ParallelLayout(sp=2, tp=2)),
        ("CFG2 x SP4", ParallelLayout(sp=4, cfg=2)),
        ("sp2×tp2", ParallelLayout(sp=2, tp=2)),
        ("dp2-cfg2-sp2", ParallelLayout(sp=2, cfg=2, dp=2)),
        ("sp8-padded", ParallelLayout(sp=8, experts="padded")),
    ],
)
def test_a_layout_is_read_from_text_and_its_label_reads_back(text: str, layout: ParallelLayout) -> None:
    assert ParallelLayout.parse(text) == layout
    assert ParallelLayout.parse(layout.label) == layout


@pytest.mark.parametrize("text", ["", "4", "sp", "pp2", "sp2sp4", "sp4 fast", "padded", "sp8 padded banks", "sp-4"])
def test_text_that_is_no_layout_is_refused_with_examples(text: str) -> None:
    with pytest.raises(LayoutError, match=r"write for example sp4, tp2sp2"):
        ParallelLayout.parse(text)


@pytest.mark.parametrize("sizes", [{"sp": 0}, {"tp": -1}, {"cfg": 3}, {"dp": 0}, {"experts": "even"}])
def test_sizes_that_mean_nothing_are_refused(sizes: dict) -> None:
    with pytest.raises(LayoutError, match="it must be"):
        ParallelLayout(**sizes)


def test_attention_allows_the_eight_divisors_of_24() -> None:
    legal = {layout.sp for layout in legal_layouts(ModelShape(), 24) if layout.tp == layout.cfg == 1}
    assert legal == {1, 2, 3, 4, 6, 8, 12, 24}


def test_tensor_parallelism_allows_one_two_and_four() -> None:
    legal = legal_layouts(ModelShape(), 24)
    assert {layout.tp for layout in legal} == {1, 2, 4}
    assert all(24 % (layout.tp * layout.sp) == 0 for layout in legal)
    assert ParallelLayout(sp=2, tp=2) in legal
    assert ParallelLayout(sp=12, cfg=2) in legal


def test_legal_layouts_need_no_more_devices_than_there_are() -> None:
    for devices in (1, 2, 5, 8):
        legal = legal_layouts(ModelShape(), devices)
        assert max(layout.world for layout in legal) <= devices
        for layout in legal:
            check_layout(layout, ModelShape(), devices)
    assert legal_layouts(ModelShape(), 1) == [ParallelLayout()]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sp5", "sp5 does not divide the 24 attention heads"),
        ("tp3", "tp3 does not divide the 8192 columns"),
        ("tp8", "tp8 does not divide the 12 MoE heads"),
        ("tp2sp24", "tp·sp = 48 does not divide the 24 attention heads"),
        ("sp12", "it needs 12 devices and 8 are there"),
        ("dp3sp4", "it needs 12 devices and 8 are there"),
    ],
)
def test_an_impossible_layout_is_answered_with_the_reason_and_what_is_legal(text: str, reason: str) -> None:
    with pytest.raises(LayoutError) as caught:
        check_layout(ParallelLayout.parse(text), ModelShape(), 8)
    assert reason in str(caught.value)
    assert "sp 1, 2, 3, 4, 6, 8; tp2 with sp 1, 2, 3, 4; tp4 with sp 1, 2;" in str(caught.value)


def test_grouped_kv_heads_must_divide_the_ranks_or_be_divided_by_them() -> None:
    refiner = ModelShape(heads=32, kv_heads=8, moe_heads=0, widths=(4096, 10920))
    legal = {layout.sp for layout in legal_layouts(refiner, 32) if layout.tp == layout.cfg == 1}
    assert legal == {1, 2, 4, 8, 16, 32}
    odd = ModelShape(heads=24, kv_heads=6, moe_heads=12, widths=())
    with pytest.raises(LayoutError, match="neither sp4 nor the 6 key/value heads of a rank divides the other"):
        check_layout(ParallelLayout(sp=4), odd, 8)


def test_experts_divide_over_sequence_ranks_or_else_over_tensor_ranks() -> None:
    assert ParallelLayout(sp=8).expert_shares(12, 256) == bank_shares(12, 256, 8)
    assert ParallelLayout(sp=8, experts="padded").expert_shares(12, 256) == bank_shares(12, 256, 8, "padded")
    both = ParallelLayout(sp=3, tp=2)
    assert both.expert_shares(12, 256) == bank_shares(12, 256, 2)
    held = [both.share(rank, 12, 256) for rank in range(6)]
    assert [(share.tp, share.tp_rank, share.banks.first_head) for share in held] == [(2, 0, 0), (2, 1, 6)] * 3
