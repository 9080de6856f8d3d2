"""Every parallel layout gives the result of one rank, with exactly the communication of 10 §11.4."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext, gather_tokens
from magi2_native.distributed.layout import ParallelLayout, TokenSplit, bank_shares, split_evenly
from magi2_native.tests.parallel_model import CONFIG, DENSE_LAYERS, MOE_LAYERS, SHOTS, build, packed
from magi2_native.tests.ranks import Traffic, counted_traffic, run_ranks
from torch import Tensor

LAYOUTS = (
    "sp2", "sp3", "sp4", "sp6", "sp8", "sp8-padded", "sp12", "sp24", "tp2", "tp4", "tp2sp2", "tp2sp4", "dp2sp2",
)  # fmt: skip


@cache
def alone(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What one rank computes for every request."""
    return results_of(ParallelContext.single(), dtype)


def together(rank: int, layout: ParallelLayout, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return results_of(ParallelContext.create(layout, rank), dtype)


def results_of(parallel: ParallelContext, dtype: torch.dtype) -> dict[str, Tensor]:
    model, results = build(parallel, dtype), {}
    for name, shot in SHOTS.items():
        packed_layout, tokens = packed(shot)
        results[name] = model(model.prepare(packed_layout, "cpu"), tokens)
    return results


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_rank_of_a_layout_has_the_result_of_one_rank(text: str) -> None:
    layout = ParallelLayout.parse(text)
    for results in run_ranks(layout.world, together, layout):
        for name, expected in alone().items():
            assert results[name].shape == expected.shape
            assert distance(results[name], expected) <= 1e-5, name


@pytest.mark.parametrize(("text", "limit"), [("sp4", 0.03), ("sp8", 0.03), ("tp2", 0.06)])
def test_in_bf16_a_layout_stays_within_the_noise_of_its_roundings(text: str, limit: float) -> None:
    # 10 §13: the median over tokens, because a near-tied expert may flip
    layout = ParallelLayout.parse(text)
    expected = alone(torch.bfloat16)["text_to_clip"]
    for results in run_ranks(layout.world, together, layout, torch.bfloat16):
        got = results["text_to_clip"]
        clip_rows = expected.norm(dim=1) > 0
        errors = (got - expected).norm(dim=1)[clip_rows] / expected.norm(dim=1)[clip_rows]
        assert errors.median() <= limit


def branches_apart(rank: int, layout: ParallelLayout) -> dict[str, Tensor]:
    """Each cfg group evaluates one branch; then the branches are joined."""
    context = ParallelContext.create(layout, rank)
    model, results = build(context), {}
    branch = context.position.cfg
    for name, shot in SHOTS.items():
        if shot.other_text is None:
            continue
        packed_layout, tokens = packed(shot, slice(branch, branch + 1))
        y_TC = model(model.prepare(packed_layout, "cpu"), tokens)
        counts = tuple(packed(shot, slice(i, i + 1))[0].tokens for i in (0, 1))
        results[name] = gather_tokens(y_TC, TokenSplit(counts, branch), context.cfg_group)
    return results


@pytest.mark.parametrize("text", ["cfg2", "cfg2sp2", "cfg2tp2", "cfg2sp3", "cfg2tp2sp2"])
def test_guidance_branches_on_two_groups_give_the_result_of_both_in_one_sequence(text: str) -> None:
    layout = ParallelLayout.parse(text)
    for results in run_ranks(layout.world, branches_apart, layout):
        assert len(results) == 3
        for name, result in results.items():
            assert distance(result, alone()[name]) <= 1e-5, name


def test_the_requests_include_what_they_are_there_for() -> None:
    tokens = {name: packed(shot)[0] for name, shot in SHOTS.items()}
    assert [tokens["text_to_clip"].tokens % ranks for ranks in (4, 6, 8)] == [2, 2, 6]  # uneven
    assert tokens["picture_to_clip"].tokens % 8
    assert tokens["fewer_tokens_than_ranks"].tokens == 3
    assert tokens["one_token"].tokens == 1
    for name in ("text_to_clip", "picture_to_clip"):  # ranks without a modality
        held = [set(rows.tolist()) for rows in tokens[name].modality_T.split(split_evenly(tokens[name].tokens, 8))]
        assert any(len(kinds) == 1 for kinds in held)
        assert set().union(*held) == {0, 1, 2}
    for result in alone().values():
        assert torch.isfinite(result).all()


def test_moving_a_token_to_another_branch_changes_the_result() -> None:
    """What the comparison above can see: a result of the wrong rows is far from the right one."""
    model = build(ParallelContext.single())
    layout, tokens = packed(SHOTS["text_to_clip"])
    first, middle, last = layout.cu_seqlens
    wrong = type(layout)(layout.coords_T9, layout.modality_T, (first, middle - 1, last))
    assert distance(model(model.prepare(wrong, "cpu"), tokens), alone()["text_to_clip"]) > 1e-3


def traffic(rank: int, layout: ParallelLayout, forwards: int) -> tuple[Traffic, Traffic]:
    """The traffic of preparing a request, and of its forwards."""
    model = build(ParallelContext.create(layout, rank))
    packed_layout, tokens = packed(SHOTS["text_to_clip"])
    with counted_traffic() as preparing:
        prepared = model.prepare(packed_layout, "cpu")
    with counted_traffic() as running:
        for _ in range(forwards):
            model(prepared, tokens)
    return preparing, running


@pytest.mark.parametrize("text", ["sp2", "sp4", "sp8", "sp8-padded"])
def test_sequence_parallelism_needs_four_exchanges_a_moe_layer_two_a_dense_one_and_one_gather(text: str) -> None:
    layout = ParallelLayout.parse(text)
    for preparing, running in run_ranks(layout.world, traffic, layout, 2):
        assert preparing.calls == []
        assert len(running.calls) == 2 * (4 * MOE_LAYERS + 2 * DENSE_LAYERS + 1)
        assert running.count("all_to_all_single") == 2 * (4 * MOE_LAYERS + 2 * DENSE_LAYERS)
        assert running.count("all_gather_single") == 2


@pytest.mark.parametrize("text", ["sp2", "sp4", "sp8", "sp8-padded"])
def test_the_bytes_of_every_exchange_are_those_of_the_formulas(text: str) -> None:
    layout = ParallelLayout.parse(text)
    itemsize, width = 4, CONFIG.hidden_size
    head = CONFIG.moe_head_dim * itemsize
    tokens = packed(SHOTS["text_to_clip"])[0].tokens
    local = split_evenly(tokens, layout.sp)
    shares = bank_shares(12, CONFIG.moe.num_experts, layout.sp, layout.experts)
    sent_heads = sum(share.heads for share in shares)
    # 70 §5: balanced banks send no more than whole heads padded to 16 would; our padded form leaves the padding out.
    assert sent_heads == {"sp8": 16}.get(text, 12)
    for rank, (_, running) in enumerate(run_ranks(layout.world, traffic, layout, 1)):
        qkv = 3 * width * itemsize * local[rank]
        attention_out = tokens * width // layout.sp * itemsize
        dispatch = sent_heads * head * local[rank]
        undispatch = shares[rank].heads * head * tokens
        dense, moe = [qkv, attention_out], [qkv, attention_out, dispatch, undispatch]
        final = max(local) * CONFIG.out_channels * 4
        assert running.sent == [*dense, *moe, *moe, *dense, final]


def test_the_formulas_at_the_released_sizes_are_the_published_bytes() -> None:
    # 10 §11.4 at T = 30,000, without what stays on the rank; 8 ranks send 16 heads, padded or balanced
    for ranks, moe_layer, forward in ((4, 207e6, 8.0e9), (8, 134e6, 5.2e9)):
        leaving = 30_000 / ranks * (ranks - 1) / ranks
        experts = 2 * 512 * sum(share.heads for share in bank_shares(12, 256, ranks))
        assert (24_576 + experts) * leaving == pytest.approx(moe_layer, rel=0.01)
        assert (36 * (24_576 + experts) + 4 * 24_576) * leaving == pytest.approx(forward, rel=0.01)


@pytest.mark.parametrize("text", ["tp2", "tp2sp2"])
def test_tensor_parallelism_reduces_and_exchanges_no_moe_heads(text: str) -> None:
    layout = ParallelLayout.parse(text)
    local = split_evenly(packed(SHOTS["text_to_clip"])[0].tokens, layout.sp)
    for rank, (preparing, running) in enumerate(run_ranks(layout.world, traffic, layout, 1)):
        assert preparing.calls == []
        reduced = [size for name, size in zip(running.calls, running.sent, strict=True) if name == "all_reduce"]
        # The three partial sums of a MoE layer are added before one reduction; each is [S, D] (10 §11.2, §11.4).
        rows = local[layout.position(rank).sp]
        assert reduced == [rows * CONFIG.hidden_size * 4] * (2 * (MOE_LAYERS + DENSE_LAYERS))
        attention = 2 * (MOE_LAYERS + DENSE_LAYERS) if layout.sp > 1 else 0
        assert running.count("all_to_all_single") == attention
        assert len(running.calls) == 2 * (MOE_LAYERS + DENSE_LAYERS) + attention + (layout.sp > 1)


def test_a_rank_alone_communicates_nothing() -> None:
    for preparing, running in run_ranks(2, traffic, ParallelLayout(dp=2), 1):
        assert preparing.calls == running.calls == []
