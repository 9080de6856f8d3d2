"""Routing, the routed experts, and the MLP branches (10 §8, §9, 70 §5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import ExpertDivision, bank_shares
from magi2_native.magi2_core.checkpoint.shard import local_slices
from magi2_native.magi2_core.dit import moe
from magi2_native.magi2_core.dit.activation import swiglu7, swiglu7_pair
from magi2_native.magi2_core.dit.moe import RoutedExperts
from magi2_native.magi2_core.dit.norm import rms_norm
from magi2_native.magi2_core.dit.parameters import preview_tensors
from magi2_native.magi2_core.dit.router import route
from magi2_native.magi2_core.dit.weights import Tensors
from magi2_native.magi2_core.kernels import experts as kernels
from magi2_native.magi2_core.kernels.experts import grouped_by_loop, grouped_on_device, head_experts, sort_routes
from magi2_native.tests.dit_models import CONFIG, fill, small_layer, small_prepared
from magi2_native.tests.test_dit_operators import random
from torch import Tensor

PREFIX = "block.layers.1.mlp.moe_mlp."
M, E, K, D, F_WIDTH = 3, 8, 3, 16, 12
WHOLE = ParallelContext.single().share(M, E)


# Router


def test_the_bias_selects_and_the_unbiased_scores_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    bias = torch.tensor([0.0, 0.0, 9.0, -9.0])  # always expert 2, never expert 3
    weights, experts = route(logits, bias, 2, scale=4.9)
    assert experts.tolist() == [[2, 1]]
    score = torch.sigmoid(torch.tensor([-1.0, 1.0]))
    assert torch.allclose(weights[0], 4.9 * score / score.sum())


def test_experts_come_in_descending_order_of_the_biased_score() -> None:
    logits, bias = random(50, E), random(E, seed=1)
    _, experts = route(logits, bias, K)
    biased = (logits.sigmoid() + bias).gather(1, experts)
    assert (biased.diff(dim=1) <= 0).all()


def test_weights_are_left_as_scores_where_they_are_not_normalised() -> None:
    weights, experts = route(random(5, E), torch.zeros(E), K, normalize=False, scale=2.0)
    assert torch.equal(weights, 2 * random(5, E).sigmoid().gather(1, experts))


def test_scores_that_underflow_do_not_divide_by_zero() -> None:
    weights, _ = route(torch.full((1, E), -200.0), torch.zeros(E), K)
    assert torch.equal(weights, torch.zeros(1, K))


def test_routes_are_sorted_by_bank_and_stay_in_order_within_a_bank() -> None:
    bank = torch.tensor([2, 0, 2, 5, 0, 2, 4])
    order, ends = sort_routes(bank, 4)
    assert order.tolist() == [1, 4, 0, 2, 5, 6, 3]
    assert ends.tolist() == [2, 2, 5, 5]  # banks 4 and 5 belong to another rank
    assert ends.dtype == torch.int32


# Experts of one head


def expert_weights(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((E, D, F_WIDTH), (E, D, F_WIDTH), (E, F_WIDTH, D))
    w_gate, w_up, w_down = (random(*shape, seed=i, dtype=dtype) * 0.5 for i, shape in enumerate(shapes))
    return w_gate, w_up, w_down


def defined(x_Td: Tensor, weights_TK: Tensor, expert_TK: Tensor, *w: Tensor) -> Tensor:
    """Route by route in fp64, with the one rounding inside that 10 §9 has; the sum is left unrounded."""
    y_Td = torch.zeros(x_Td.shape, dtype=torch.float64)
    w_gate, w_up, w_down = (tensor.double() for tensor in w)
    for t in range(len(x_Td)):
        for k in range(expert_TK.shape[1]):
            e = int(expert_TK[t, k])
            x = x_Td[t].double()
            hidden = swiglu7_pair(x @ w_gate[e], x @ w_up[e]).to(x_Td.dtype)
            y_Td[t] += weights_TK[t, k].double() * (hidden.double() @ w_down[e])
    return y_Td


def routes(tokens: int, experts: int = E) -> tuple[Tensor, Tensor]:
    return route(random(tokens, experts, seed=7), random(experts, seed=8), K, scale=4.9)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_a_token_gets_the_weighted_sum_of_its_experts(tokens: int) -> None:
    x, w = random(tokens, D), expert_weights(torch.float32)
    got = head_experts(x, *routes(tokens), *w)
    assert got.shape == (tokens, D)
    assert torch.allclose(got.double(), defined(x, *routes(tokens), *w), atol=2e-5)


def test_experts_that_no_token_chose_cost_nothing() -> None:
    """Few tokens leave experts empty (70 §1)."""
    x, w = random(2, D), expert_weights(torch.float32)
    weights, experts = routes(2)
    assert len(experts.unique()) < E
    assert torch.allclose(head_experts(x, weights, experts, *w).double(), defined(x, weights, experts, *w), atol=2e-5)


def test_in_bf16_only_the_hidden_row_and_the_sum_are_rounded() -> None:
    x, w = random(200, D, dtype=torch.bfloat16), expert_weights(torch.bfloat16)
    weights, experts = routes(200)
    exact = defined(x, weights, experts, *w)
    got = head_experts(x, weights, experts, *w)
    assert got.dtype == torch.bfloat16
    wrong = (got != exact.to(torch.bfloat16)).float().mean().item()
    assert wrong < 0.01  # a hidden value at a midpoint may fall either way

    def unrounded(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
        return swiglu7_pair(gate, up)

    with pytest.MonkeyPatch.context() as patch:  # what the limit above can see: a hidden row left unrounded
        patch.setattr(kernels, "_activate", unrounded)
        other = head_experts(x, weights, experts, *w)
    assert (other != exact.to(torch.bfloat16)).float().mean() > 10 * max(wrong, 1e-3)


def test_the_sum_over_choices_is_repeatable_and_does_not_depend_on_other_tokens() -> None:
    x, w = random(100, D, dtype=torch.bfloat16), expert_weights(torch.bfloat16)
    weights, experts = routes(100)
    first = head_experts(x, weights, experts, *w)
    assert torch.equal(first, head_experts(x, weights, experts, *w))
    shuffled = torch.randperm(100, generator=torch.Generator().manual_seed(0))
    again = head_experts(x[shuffled], weights[shuffled], experts[shuffled], *w)
    assert (again != first[shuffled]).float().mean() < 0.01  # rows of a product may be summed in another order


def test_routes_of_another_ranks_experts_add_nothing_even_where_rows_were_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = random(30, D), expert_weights(torch.float32)
    weights, experts = routes(30)
    whole = head_experts(x, weights, experts, *w)

    def poisoned(x_Ri: Tensor, w_Eio: Tensor, ends_E: Tensor) -> Tensor:
        y = grouped_by_loop(x_Ri, w_Eio, ends_E)
        y[ends_E[-1] :] = torch.nan
        return y

    monkeypatch.setattr(kernels, "_grouped", poisoned)
    parts = []
    for own in (slice(0, 3), slice(3, 8)):
        mine = (experts >= own.start) & (experts < own.stop)
        bank = torch.where(mine, experts - own.start, own.stop - own.start)
        parts.append(head_experts(x, weights, bank, *(tensor[own] for tensor in w), shared=True))
    assert torch.allclose(parts[0] + parts[1], whole, atol=1e-5)


@pytest.mark.parametrize("product", [kernels.GROUPED_MM, torch._grouped_mm], ids=["here", "torch 2.9"])
def test_the_grouped_product_of_a_device_means_the_same_as_the_loop(
    product: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "GROUPED_MM", product)
    x, w = random(40, 16, dtype=torch.bfloat16), random(5, 16, 24, seed=1, dtype=torch.bfloat16)
    ends = torch.tensor([7, 7, 20, 31, 31], dtype=torch.int32)
    got, expected = grouped_on_device(x, w, ends), grouped_by_loop(x, w, ends)
    assert torch.equal(got[:31], expected[:31].bfloat16())


def test_a_torch_without_grouped_products_is_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "GROUPED_MM", None)
    kernels._warn_of_old_torch.cache_clear()
    assert not any(kernels.runs_on_device("cuda", torch.bfloat16, 512, 640) for _ in range(3))
    (record,) = caplog.records
    assert "Update torch to 2.9" in record.getMessage()


def test_expert_matrices_are_input_major() -> None:
    x, ends = random(3, 4), torch.tensor([3], dtype=torch.int32)
    w = random(1, 4, 6, seed=1)
    assert torch.allclose(grouped_by_loop(x, w, ends), x @ w[0], atol=1e-6)


# All heads of a rank


def routed(ranks: int, rank: int, mode: ExpertDivision = "banks", dtype: torch.dtype = torch.float32) -> RoutedExperts:
    """The experts of one of several ranks, cut from the same whole tensors."""
    config = replace(CONFIG, params_dtype=dtype)
    table = preview_tensors(config)
    share = bank_shares(M, E, ranks, mode)[rank]
    rank_share = replace(WHOLE, banks=share)
    whole = RoutedExperts(config.moe, WHOLE.banks, Tensors(table, WHOLE, PREFIX))
    fill(whole, PREFIX)
    part = RoutedExperts(config.moe, share, Tensors(table, rank_share, PREFIX))
    for name, parameter in part.named_parameters():
        (region,) = local_slices(table[PREFIX + name], rank_share)
        parameter.data.copy_(dict(whole.named_parameters())[name][region])
    return part


@pytest.mark.parametrize("mode", ["banks", "padded"])
@pytest.mark.parametrize("ranks", [2, 4, 5, 24])
def test_the_parts_of_all_ranks_add_up_to_the_whole(ranks: int, mode: ExpertDivision) -> None:
    x_TMd = random(20, M, D)
    expected = routed(1, 0)(x_TMd)
    total = torch.zeros_like(x_TMd)
    for rank in range(ranks):
        experts = routed(ranks, rank, mode)
        touched = slice(experts.share.first_head, experts.share.first_head + experts.share.heads)
        total[:, touched] += experts(x_TMd[:, touched])
    assert torch.allclose(total, expected, atol=1e-4)
    assert expected.abs().mean() > 0.1


def test_a_rank_evaluates_only_its_own_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []

    def counting(x_Ri: Tensor, w_Eio: Tensor, ends_E: Tensor) -> Tensor:
        rows.append(int(ends_E[-1]))
        return grouped_by_loop(x_Ri, w_Eio, ends_E)

    monkeypatch.setattr(kernels, "_grouped", counting)
    x_TMd = random(20, M, D)
    for rank in range(5):
        experts = routed(5, rank)
        experts(x_TMd[:, experts.share.first_head : experts.share.last_head])
    assert sum(rows) == 3 * 20 * M * K  # three products for every route, on exactly one rank


def test_long_sequences_are_evaluated_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TMd, calls = random(20, M, D), []
    expected = routed(1, 0)(x_TMd)
    monkeypatch.setattr(moe, "_HIDDEN", 7 * K * F_WIDTH)
    monkeypatch.setattr(moe, "head_experts", lambda *a, **k: (calls.append(len(a[0])), head_experts(*a, **k))[1])
    assert torch.allclose(routed(1, 0)(x_TMd), expected, atol=1e-5)
    assert calls == [7, 7, 6] * M


def test_a_rank_without_banks_returns_no_heads() -> None:
    experts = routed(4, 3, "padded")
    assert experts.share.heads == 0
    assert experts(random(20, 0, D)).shape == (20, 0, D)


def test_the_bias_in_force_is_the_one_named_expert_bias() -> None:
    experts, x = routed(1, 0), random(20, M, D)
    before = experts(x)
    experts.router.expert_bias_ema.data.add_(torch.linspace(-5, 5, M * E))
    assert torch.equal(experts(x), before)
    experts.router.expert_bias.data.add_(torch.linspace(-5, 5, M * E))
    assert not torch.allclose(experts(x), before)


# Branches


def test_the_dense_branch_is_norm_up_activation_down_in_the_compute_dtype() -> None:
    mlp, prepared = small_layer("mm", torch.bfloat16).mlp, small_prepared()
    u = random(prepared.split.local, 48, dtype=torch.bfloat16)
    out = mlp(u, prepared)
    for run in prepared.runs:
        x = rms_norm(u[run.rows], mlp.pre_norm.of(run.modality))
        hidden = swiglu7(F.linear(x, mlp.up_gate_proj.of(run.modality)))
        assert torch.equal(out[run.rows], F.linear(hidden, mlp.down_proj.of(run.modality)))


@pytest.mark.parametrize("kind", ["moe", "mm_moe"])
def test_the_moe_branch_adds_shared_and_modality_experts_first_and_the_routed_term_last(kind: str) -> None:
    mlp, prepared = small_layer(kind, torch.bfloat16).mlp, small_prepared()
    u = random(prepared.split.local, 48, dtype=torch.bfloat16)
    x = torch.cat([rms_norm(u[run.rows], mlp.pre_norm.of(run.modality)) for run in prepared.runs])
    y = mlp.moe_mlp(F.linear(x, mlp.split_linear.weight).unflatten(1, (M, D))).flatten(1)
    out = mlp(u, prepared)
    for run in prepared.runs:
        own = F.linear(x[run.rows], mlp.modality_specific_shared_expert_fc1.of(run.modality))
        both = torch.cat([F.linear(x[run.rows], mlp.shared_expert_fc1.weight), own], 1)
        shared, own = swiglu7(both).split([16, 8], 1)  # as the reference: activated side by side
        bracket = F.linear(shared, mlp.shared_expert_fc2.weight) + F.linear(
            own, mlp.modality_specific_shared_expert_fc2.of(run.modality)
        )
        assert torch.equal(out[run.rows], F.linear(y[run.rows], mlp.merge_linear.weight) + bracket)
