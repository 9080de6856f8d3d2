"""Window attention by every backend (50 §6)."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from magi2_native.magi2_core.errors import MissingDependencyError, RequestError
from magi2_native.magi2_core.refiner import window_attention
from magi2_native.magi2_core.refiner.blocks import BlockPlan, WindowSettings, plan_blocks
from magi2_native.magi2_core.refiner.window_attention import flex_block_mask, plan_windows, window_attention_
from magi2_native.tests.refiner_models import attended_pairs
from torch import Tensor
from torch.fx import GraphModule

CPU = torch.device("cpu")
SMALL = WindowSettings(block=(2, 2, 2), radius=(1, 1, 1))
PLANS = {
    "short last blocks": plan_blocks((5, 6, 7), 9, SMALL),
    "released blocks": plan_blocks((9, 9, 10), 21, WindowSettings()),
    "one radius of 0": plan_blocks((9, 5, 6), 11, WindowSettings(radius=(0, 1, 0))),
    "tail inside a tile": plan_blocks((4, 15, 16), 90, WindowSettings(radius=(0, 0, 1))),
    "no tail": plan_blocks((3, 4, 4), 0, SMALL),
    "one block": plan_blocks((2, 2, 2), 3, SMALL),
    "scan": plan_blocks((4, 4, 6), 5, WindowSettings("scan", block=(2, 2, 2), win_size=4)),
    "frames": plan_blocks((6, 2, 3), 7, WindowSettings("frame", frame_receptive_field=1)),
}


def random_qkv(plan: BlockPlan, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k and v as views of one buffer, as the transformer has them."""
    generator = torch.Generator().manual_seed(plan.tokens)
    qkv = torch.randn(plan.tokens, heads + 2 * kv_heads, 16, generator=generator).to(dtype)
    return list(qkv.split([heads, kv_heads, kv_heads], dim=1))


def definition(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 16**-0.5
    weights = scores.masked_fill(~plan.mask(), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("backend", ["mask", "gather"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_backends_equal_the_definition(plan: BlockPlan, backend: str) -> None:
    q, k, v = random_qkv(plan)
    expected = definition(q, k, v, plan)
    got = window_attention_(q, k, v, plan_windows(plan, CPU, backend))
    assert (got.double() - expected).abs().max() < 2e-6


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_bf16_is_rounded_once(backend: str) -> None:
    plan = PLANS["short last blocks"]
    q, k, v = random_qkv(plan, dtype=torch.bfloat16)
    expected = definition(q, k, v, plan)
    got = window_attention_(q, k, v, plan_windows(plan, CPU, backend))
    assert got.dtype == torch.bfloat16
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_query_heads_share_key_heads_in_order(kv_heads: int) -> None:
    plan = PLANS["short last blocks"]
    q, k, v = random_qkv(plan, heads=8, kv_heads=kv_heads)
    expected = definition(q, k, v, plan)
    assert (window_attention_(q, k, v, plan_windows(plan, CPU, "gather")).double() - expected).abs().max() < 2e-6


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["short last blocks"]
    windows = plan_windows(plan, CPU, "gather")
    q, k, v = random_qkv(plan)
    together = window_attention_(q.clone(), k, v, windows)
    monkeypatch.setitem(window_attention._GATHERED, "cpu", 1)
    assert torch.allclose(window_attention_(q.clone(), k, v, windows), together, atol=1e-6)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_gathering_backend_computes_the_attended_pairs_and_no_others(
    plan: BlockPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = 0

    def counting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal computed
        computed += q.shape[0] * q.shape[1] * k.shape[1]
        return q

    monkeypatch.setattr(window_attention, "_dense", counting)
    window_attention_(*random_qkv(plan), plan_windows(plan, CPU, "gather"))
    assert computed == attended_pairs(plan)


def test_full_size_indices_stay_small() -> None:
    windows = plan_windows(plan_blocks((63, 68, 120), 2048, WindowSettings()), CPU)
    assert windows.backend == "gather"
    tensors = [x for b in windows.buckets for x in (b.query_starts_N, b.key_starts_NR, b.run_K, b.offset_K)]
    assert sum(x.numel() for x in tensors) < 2_000_000
    assert sum(len(b.query_starts_N) for b in windows.buckets) == 4080


def test_small_sequences_use_the_mask() -> None:
    assert plan_windows(PLANS["no tail"], CPU).backend == "mask"


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_tile_lists_of_the_compiled_backend_miss_no_pair_and_test_the_rest(plan: BlockPlan) -> None:
    block_mask = flex_block_mask(plan, CPU)
    rows = torch.arange(plan.tokens)
    tested = block_mask.mask_mod(None, None, rows[:, None], rows)
    assert torch.equal(tested, plan.mask())
    tiles = -(-plan.tokens // 128)

    def listed(counts: Tensor, indices: Tensor) -> Tensor:
        on = torch.zeros(tiles, tiles, dtype=torch.bool)
        for query in range(tiles):
            on[query, indices[0, 0, query, : counts[0, 0, query]].long()] = True
        return on

    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    assert not (partial & full).any()
    mask = plan.mask()
    for query, key in torch.cartesian_prod(torch.arange(tiles), torch.arange(tiles)).tolist():
        tile = mask[query * 128 : (query + 1) * 128, key * 128 : (key + 1) * 128]
        if full[query, key]:
            assert tile.all()
        elif not partial[query, key]:
            assert not tile.any()


def test_most_tiles_of_a_large_clip_are_not_listed() -> None:
    plan = plan_blocks((33, 36, 40), 128, WindowSettings(radius=(1, 1, 1)))
    block_mask = flex_block_mask(plan, CPU)
    full, partial = (int(x.sum()) for x in (block_mask.full_kv_num_blocks, block_mask.kv_num_blocks))
    assert full * 128**2 <= attended_pairs(plan) <= (full + partial) * 128**2 < 2 * attended_pairs(plan)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_compiled_backend_equals_the_definition_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(window_attention, "_compiled_flex", lambda: flex_attention)
    plan = PLANS["short last blocks"]
    q, k, v = random_qkv(plan)
    expected = definition(q, k, v, plan)
    got = window_attention_(q, k, v, plan_windows(plan, CPU, "flex"))
    assert (got.double() - expected).abs().max() < 2e-6


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[GraphModule]]:
    """What is compiled for the flex backend; it is run as it is."""
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, _inputs: list[Tensor]) -> GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    window_attention._compiled_flex.cache_clear()
    yield graphs
    window_attention._compiled_flex.cache_clear()
    torch._dynamo.reset()


def test_prompts_of_other_lengths_compile_nothing_again(compiler: list[GraphModule]) -> None:
    counts = []
    for tail in (9, 30, 55, 300, 41, 87, 120, 1, 200, 77, 430):
        plan = plan_blocks((5, 6, 7), tail, SMALL)
        q, k, v = random_qkv(plan)
        expected = definition(q, k, v, plan)
        got = window_attention_(q, k, v, plan_windows(plan, CPU, "flex"))
        assert (got.double() - expected).abs().max() < 2e-6
        counts.append(len(compiler))
    # one length, then other lengths of as many tiles, then all
    assert counts[:3] == [1, 2, 3]
    assert set(counts[3:]) == {3}


def test_a_kernel_that_cannot_be_compiled_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_graph: GraphModule, _inputs: list[Tensor]) -> GraphModule:
        raise RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable.")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    window_attention._compiled_flex.cache_clear()
    plan = PLANS["short last blocks"]
    with pytest.raises(MissingDependencyError, match=r"Failed to find C compiler\..*'gather'"):
        window_attention_(*random_qkv(plan), plan_windows(plan, CPU, "flex"))
    window_attention._compiled_flex.cache_clear()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(RequestError, match="auto, mask, gather, flex"):
        plan_windows(PLANS["no tail"], CPU, "dense")


def test_rows_that_do_not_fit_the_plan_are_refused() -> None:
    q, k, v = random_qkv(PLANS["no tail"])
    with pytest.raises(ValueError, match="rows"):
        window_attention_(q[:-1], k, v, plan_windows(PLANS["no tail"], CPU, "gather"))
