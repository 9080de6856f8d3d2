"""Attention inside segments, with sinks and soft-capping, and the branch around it (10 §7, 70 §4)."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from magi2_native.magi2_core.dit.attention import apply_sinks_, attend, head_gate_
from magi2_native.magi2_core.dit.norm import rms_norm
from magi2_native.magi2_core.dit.rope import rotate
from magi2_native.magi2_core.kernels import attention as kernels
from magi2_native.magi2_core.kernels.attention import explicit_attention, varlen_attention
from magi2_native.tests.dit_models import small_layer, small_prepared
from magi2_native.tests.test_dit_operators import random
from torch import Tensor

CU_SEQLENS = (0, 9, 9, 10, 30)  # an empty segment and one of a single token
T, D = 30, 16


def defined(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: tuple[int, ...], sinks: Tensor | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The definition in fp64: sinks are further keys with values of zero (10 §7 step 9)."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[1], len(q), dtype=torch.float64)
    for start, stop in pairwise(cu_seqlens):
        if start == stop:
            continue
        z = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) * q.shape[-1] ** -0.5
        z = softcap * torch.tanh(z / softcap) if softcap > 0 else z
        lse[:, start:stop] = z.logsumexp(-1)
        values = v[start:stop]
        if sinks is not None:
            z = torch.cat([z, sinks.double().t()[:, None].expand(-1, z.shape[1], -1)], -1)
            values = torch.cat([values, values.new_zeros(len(sinks), *values.shape[1:])])
        out[start:stop] = torch.einsum("hqk,khd->qhd", z.softmax(-1), values)
    return out, lse


def inputs(heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((T, heads, D), (T, kv_heads, D), (T, kv_heads, D))
    q, k, v = (2 * random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("softcap", [-1.0, 0.0, 3.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_is_a_softmax_over_the_own_segment(heads: int, kv_heads: int, softcap: float) -> None:
    q, k, v = inputs(heads, kv_heads)
    out, lse = varlen_attention(q, k, v, CU_SEQLENS, scale=D**-0.5, softcap=softcap)
    expected, expected_lse = defined(q, k, v, CU_SEQLENS, softcap=softcap)
    assert torch.allclose(out.double(), expected, atol=3e-6)
    assert torch.allclose(lse.double(), expected_lse, atol=3e-6)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("softcap", [-1.0, 3.0])
@pytest.mark.parametrize("sink_rows", [1, 2])
def test_a_sink_is_a_key_whose_value_is_zero(sink_rows: int, softcap: float) -> None:
    q, k, v = inputs()
    sinks = 2 * random(sink_rows, 4, seed=5)
    expected, _ = defined(q, k, v, CU_SEQLENS, sinks, softcap)
    assert torch.allclose(attend(q, k, v, CU_SEQLENS, sinks, softcap).double(), expected, atol=3e-6)
    assert (expected.norm() - defined(q, k, v, CU_SEQLENS, None, softcap)[0].norm()).abs() > 0.1


def test_a_sink_far_above_and_far_below_the_scores_is_exact() -> None:
    q, k, v = inputs()
    sinks = torch.tensor([[300.0, -300.0, 0.0, 50.0]])
    out = attend(q, k, v, CU_SEQLENS, sinks, -1.0)
    assert torch.equal(out[:, 0], torch.zeros(T, D))
    assert torch.equal(out[:, 1], varlen_attention(q, k, v, CU_SEQLENS, scale=D**-0.5)[0][:, 1])
    assert out.isfinite().all()


def test_in_bf16_probabilities_and_sink_share_stay_fp32() -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    sinks = random(1, 4, seed=5)
    exact, lse = defined(q, k, v, CU_SEQLENS)
    out, _ = varlen_attention(q, k, v, CU_SEQLENS, scale=D**-0.5)
    assert out.dtype == torch.bfloat16
    assert (out != exact.to(torch.bfloat16)).float().mean() < 0.01
    share = torch.sigmoid(lse - sinks.double().logsumexp(0)[:, None]).t()[..., None]
    shrunk = apply_sinks_(out.clone(), lse.float(), sinks)
    assert torch.equal(shrunk, (out.double() * share).to(torch.bfloat16))
    assert not torch.equal(shrunk, out * share.to(torch.bfloat16))  # the share rounded first


def test_the_explicit_path_gives_the_same_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (random(2, 3, 50, D, seed=i) for i in range(3))
    whole = explicit_attention(q, k, v, 0.25, 2.0)
    monkeypatch.setattr(kernels, "_SCORES", 7 * 2 * 3 * 50)
    for got, expected in zip(explicit_attention(q, k, v, 0.25, 2.0), whole, strict=True):
        assert torch.allclose(got, expected, atol=1e-6)


def test_soft_capping_takes_the_explicit_path_and_nothing_else_does_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("explicit_attention", "_cpu_flash"):
        original = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, n=name, o=original: (called.append(n), o(*a))[1])
    for softcap in (2.0, 0.0, -1.0):
        varlen_attention(*inputs(), (0, T), scale=1.0, softcap=softcap)
    assert called == ["explicit_attention", "_cpu_flash", "_cpu_flash"]


@pytest.mark.parametrize("kernel", ["_cuda_flash", "_cuda_efficient"])
def test_the_cuda_kernels_are_called_as_torch_declares_them(kernel: str) -> None:
    # Shapes only: this machine need not have the device.
    q = torch.empty(2, 3, 40, D, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 1, 40, D, dtype=torch.bfloat16, device="meta").expand(2, 3, 40, D)
    out, lse = getattr(kernels, kernel)(q, k, k, 0.25)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:-1], torch.float32)


def test_the_gate_is_one_sigmoid_for_each_head_and_keeps_its_own_dtype() -> None:
    o, gate = random(T, 4, D, dtype=torch.bfloat16), random(T, 4, seed=1)
    eager = o * torch.sigmoid(gate.bfloat16())[..., None]
    assert torch.equal(head_gate_(o.clone(), gate.bfloat16()), eager)  # 10 §7 step 11
    once = (o.float() * torch.sigmoid(gate)[..., None]).bfloat16()
    assert torch.equal(head_gate_(o.clone(), gate), once)  # 50 §3.3: the refiner's gate is fp32


# The branch


@pytest.mark.parametrize("layer", ["mm", "plain"])
def test_queries_and_keys_are_rounded_after_the_rotation_only_and_values_are_not_normed(layer: str) -> None:
    attention, prepared = small_layer(layer, torch.bfloat16).attention, small_prepared()
    u = random(prepared.split.local, 48, dtype=torch.bfloat16)
    q, k, v, gate = attention.project(u, prepared)
    for run in prepared.runs:
        x = rms_norm(u[run.rows], attention.pre_norm.of(run.modality))
        qkv = (x @ attention.linear_qkv.of(run.modality).t()).view(len(x), -1, 8)
        rope = prepared.rope_SR[run.rows]
        for got, part, norm in ((q, qkv[:, :6], attention.q_norm), (k, qkv[:, 6:9], attention.k_norm)):
            exact = rotate(rms_norm(part, norm.of(run.modality), dtype=torch.float32), rope)
            assert torch.equal(got[run.rows], exact.bfloat16())
            early = rotate(rms_norm(part, norm.of(run.modality)).float(), rope).bfloat16()
            assert not torch.equal(early, exact.bfloat16())
        assert torch.equal(v[run.rows], qkv[:, 9:])
        assert torch.equal(gate[run.rows], x @ attention.linear_g.of(run.modality).t())


def test_the_pieces_that_rows_are_cut_into_do_not_change_the_result() -> None:
    attention = small_layer("mm", torch.float32).attention
    prepared, cut = small_prepared(), small_prepared(piece_rows=3)
    u = random(prepared.split.local, 48)
    assert torch.allclose(attention(u, prepared), attention(u, cut), atol=1e-6)
