"""How a branch reads from and writes to the residual streams, with every rounding (10 §6)."""

from __future__ import annotations

import pytest
import torch
from magi2_native.magi2_core.dit.mhc import Mix, branch_input, coefficients, sinkhorn, update_streams_
from magi2_native.tests.test_dit_operators import random
from torch import Tensor

N, ROWS, WIDTH = 4, 40, 32
KAPPA = (N * WIDTH) ** -0.5


def projected() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Logits large enough for every coefficient to vary, and their scales and offsets."""
    alphas = [torch.tensor([a]) for a in (0.7, 1.3, 2.0)]
    biases = [random(N, seed=1), random(N, seed=2), random(N, N, seed=3)]
    return 20 * random(ROWS, 2 * N + N * N), alphas, biases


def mixed(dtype: torch.dtype) -> Mix:
    return coefficients(*projected(), KAPPA, dtype)


def test_coefficients_come_from_columns_pre_post_res_with_res_row_major() -> None:
    logits, alphas, biases = projected()
    mix = mixed(torch.float32)
    row = logits[5]
    pre = torch.sigmoid(alphas[0] * KAPPA * row[:N] + biases[0])
    post = 2 * torch.sigmoid(alphas[1] * KAPPA * row[N : 2 * N] + biases[1])
    res = sinkhorn((alphas[2] * KAPPA * row[2 * N :].view(N, N) + biases[2])[..., None])[..., 0]
    assert torch.allclose(mix.pre_NS[:, 5], pre)
    assert torch.allclose(mix.post_NS[:, 5], post)
    assert torch.allclose(mix.res_NNS[..., 5], res)


def test_coefficients_are_fp32_until_they_are_rounded_once() -> None:
    exact, rounded = mixed(torch.float32), mixed(torch.bfloat16)
    for a, b in zip(exact, rounded, strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
        assert not torch.equal(a, b.float())


def test_sinkhorn_ends_with_rows_and_makes_twenty_rounds() -> None:
    logits = 3 * random(N, N, 7)
    a = torch.exp(logits.double())
    for _ in range(20):
        a = a / a.sum(0, keepdim=True)
        a = a / a.sum(1, keepdim=True)
    got = sinkhorn(logits)
    assert torch.allclose(got.double(), a, atol=1e-6)
    assert torch.allclose(got.sum(1), torch.ones(N, 7), atol=1e-6)
    column_error = (got.double().sum(0) - 1).abs().amax()
    assert torch.allclose((a.sum(0) - 1).abs().amax(), column_error, atol=1e-6)
    assert column_error > 1e-5  # so that another number of rounds, or another order, would be seen


def test_sinkhorn_survives_logits_that_overflow_an_exponential() -> None:
    assert sinkhorn(200 * random(N, N, 3)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_branch_input_is_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    streams, mix = random(ROWS, N, WIDTH, dtype=dtype), mixed(dtype)
    exact = torch.einsum("ns,snd->sd", mix.pre_NS.double(), streams.double())
    got = branch_input(streams, mix)
    assert got.dtype == dtype
    assert torch.allclose(got.double(), exact, atol=1e-6) if dtype == torch.float32 else _same(got, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_adds_the_branch_to_the_mixed_streams_with_one_rounding(dtype: torch.dtype) -> None:
    streams, mix, out = random(ROWS, N, WIDTH, dtype=dtype), mixed(dtype), random(ROWS, WIDTH, seed=4, dtype=dtype)
    exact = torch.einsum("ijs,sjd->sid", mix.res_NNS.double(), streams.double())
    exact += torch.einsum("is,sd->sid", mix.post_NS.double(), out.double())
    three_roundings = torch.einsum("ijs,sjd->sid", mix.res_NNS.float(), streams.float()).to(dtype)
    three_roundings = three_roundings + (mix.post_NS.t()[..., None].float() * out[:, None].float()).to(dtype)
    update_streams_(streams, mix, out)
    assert torch.allclose(streams.double(), exact, atol=1e-6) if dtype == torch.float32 else _same(streams, exact)
    if dtype == torch.bfloat16:
        assert not _same(three_roundings, exact)  # 10 §6: the form that is not meant


def _same(got: Tensor, exact: Tensor) -> bool:
    """Equal to the rounded exact value but for the few that an fp32 sum moves over a midpoint."""
    return bool((got != exact.to(torch.bfloat16)).float().mean() < 0.005)


def test_tensors_of_the_wrong_shape_are_refused() -> None:
    streams, mix, out = random(ROWS, N, WIDTH), mixed(torch.float32), random(ROWS, WIDTH)
    for wrong in (streams[:, :3], streams.flatten(1), streams[:5]):
        with pytest.raises(ValueError, match="streams have shape"):
            branch_input(wrong, mix)
    for wrong in (out[:, :5], out[:5]):
        with pytest.raises(ValueError, match="branch output has shape"):
            update_streams_(streams, mix, wrong)


def test_rows_of_a_mix_are_the_mix_of_those_rows() -> None:
    streams, mix = random(ROWS, N, WIDTH), mixed(torch.float32)
    rows = slice(7, 12)
    assert torch.equal(branch_input(streams[rows], mix.rows(rows)), branch_input(streams, mix)[rows])
