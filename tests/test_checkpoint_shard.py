"""Division of checkpoint tensors over ranks: bytes of every layout, and that the parts make up the whole."""

from __future__ import annotations

from math import prod

import pytest
import torch
from magi2_native.distributed.layout import BankShare, ParallelLayout, RankShare
from magi2_native.magi2_core.checkpoint.shard import Region, local_bytes, local_shape, local_slices
from magi2_native.magi2_core.checkpoint.spec import Shard, TensorSpec
from magi2_native.magi2_core.config import PreviewConfig
from magi2_native.magi2_core.dit.parameters import preview_tensors
from magi2_native.magi2_core.errors import CheckpointError

RELEASED = preview_tensors(PreviewConfig())
REPLICATED = 10_561_007_872
EXPERTS = 217_432_719_360
GATES = 113_246_208 + 884_736


def share(layout: str, rank: int) -> RankShare:
    return ParallelLayout.parse(layout).share(rank, moe_heads=12, experts=256)


def cut(tensor: torch.Tensor, regions: tuple[Region, ...]) -> torch.Tensor:
    return torch.cat([tensor[region] for region in regions])


def test_the_released_table_has_the_published_counts():
    # 10 §12.3
    assert len(RELEASED) == 1_371
    assert sum(prod(spec.shape) for spec in RELEASED.values()) == 113_934_953_536
    assert local_bytes(RELEASED, None) == 228_107_858_176


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("sp1", 228_107_858_176),
        ("sp2", 119_334_433_024),
        ("sp3", 83_076_624_640),
        ("sp4", 64_947_720_448),
        ("sp6", 46_818_816_256),
        ("sp8-padded", 46_818_816_256),
        ("sp12", 28_689_912_064),
        ("tp2", 114_234_812_800),
        ("tp2sp2", 114_234_812_800),
        ("tp4", 57_298_290_112),
    ],
)
def test_the_first_rank_holds_the_bytes_of_the_published_table(layout: str, expected: int):
    # 10 §11.3
    assert local_bytes(RELEASED, share(layout, 0)) == expected


def test_with_padded_heads_the_last_two_of_eight_ranks_hold_no_experts():
    assert [local_bytes(RELEASED, share("sp8-padded", rank)) for rank in (5, 6, 7)] == [
        46_818_816_256,
        REPLICATED,
        REPLICATED,
    ]


def test_balanced_banks_give_each_of_eight_ranks_an_eighth_of_the_experts():
    # 70 §5: 37.7 GB instead of 46.8. Each rank touches two heads, and has the router rows of both.
    for rank in range(8):
        held = local_bytes(RELEASED, share("sp8", rank))
        assert held == REPLICATED + EXPERTS // 8 + GATES * 2 // 12
        assert held / 1e9 == pytest.approx(37.76, abs=0.01)


@pytest.mark.parametrize("layout", ["sp2", "sp3", "sp8", "sp8-padded", "sp12", "tp4"])
def test_over_all_ranks_every_expert_row_is_held_once(layout: str):
    spec = RELEASED["block.layers.2.mlp.moe_mlp.W_up"]
    held: list[int] = []
    for rank in range(ParallelLayout.parse(layout).world):
        (region,) = local_slices(spec, share(layout, rank))
        held += range(region[0].start, region[0].stop)
    assert held == list(range(spec.shape[0]))


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_columns_are_cut_inside_every_block_and_part(tp: int):
    # 10 §11.2: q, k and v of each of two modality blocks are divided by themselves.
    spec = TensorSpec((2 * (8 + 4 + 4), 3), torch.float32, Shard.COLUMN, blocks=2, parts=(8, 4, 4))
    whole = torch.arange(prod(spec.shape), dtype=torch.float32).view(spec.shape)
    for rank in range(tp):
        pieces = []
        for block in whole.chunk(2):
            for part in (block[:8], block[8:12], block[12:]):
                pieces.append(part.chunk(tp)[rank])
        local = RankShare(tp, rank, BankShare(0, 0, 1))
        assert torch.equal(cut(whole, local_slices(spec, local)), torch.cat(pieces))
        assert local_shape(spec, local) == (32 // tp, 3)


@pytest.mark.parametrize("shard", [Shard.ROW, Shard.HEAD_COLUMNS])
def test_tensor_parallel_rows_are_cut_along_the_input(shard: Shard):
    spec = TensorSpec((6, 8), torch.float32, shard, blocks=3)
    whole = torch.arange(48.0).view(6, 8)
    assert torch.equal(cut(whole, local_slices(spec, RankShare(4, 3, BankShare(0, 0, 1)))), whole[:, 6:])


def test_router_rows_cover_every_expert_of_a_head_that_is_held_in_part():
    # 70 §5: rank 1 of 8 holds the second half of head 1 and all of head 2.
    banks = share("sp8", 1).banks
    assert (banks.first_bank, banks.last_bank) == (384, 768)
    gate, expert = (RELEASED[f"block.layers.2.mlp.moe_mlp.{name}"] for name in ("gate", "W_down"))
    assert local_slices(gate, share("sp8", 1)) == ((slice(256, 768), slice(0, 256)),)
    assert local_slices(expert, share("sp8", 1))[0][0] == slice(384, 768)


def test_a_rank_without_experts_has_tensors_without_rows():
    for name in ("W_gate", "gate", "router.expert_bias"):
        assert local_shape(RELEASED[f"block.layers.2.mlp.moe_mlp.{name}"], share("sp8-padded", 7))[0] == 0


def test_a_layout_that_does_not_divide_a_tensor_is_refused_with_its_size():
    spec = TensorSpec((6, 10), torch.float32, Shard.ROW)
    with pytest.raises(CheckpointError, match="10 rows or columns to divide over 4"):
        local_slices(spec, RankShare(4, 0, BankShare(0, 0, 1)))
