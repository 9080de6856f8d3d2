"""The row-wise operators: rotary embedding, norm, grouped linear, SwiGLU7 (10 §4, §5)."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from magi2_native.magi2_core.dit.activation import swiglu7, swiglu7_pair
from magi2_native.magi2_core.dit.norm import rms_norm
from magi2_native.magi2_core.dit.rope import rotary_bands, rotary_table, rotate
from magi2_native.magi2_core.dit.runs import Run, modality_runs, pieces
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.precision import true_fp32
from torch import Tensor


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def coords(position: tuple[float, ...], size: tuple[float, ...], reference: tuple[float, ...]) -> Tensor:
    return torch.tensor([[*position, *size, *reference]])


def angles(position: tuple[float, ...], size: tuple[float, ...], reference: tuple[float, ...]) -> Tensor:
    """The angle of band 0 on each axis, from sine and cosine."""
    sin, cos = rotary_table(coords(position, size, reference), rotary_bands(16))[0].chunk(2)
    return torch.atan2(sin, cos).view(3, 2)[:, 0]


# Rotary embedding


def test_the_bands_are_powers_of_one_over_10000() -> None:
    bands = rotary_bands(128)
    assert bands.shape == (16,)
    assert bands.dtype == torch.float32
    assert torch.allclose(bands.double(), torch.tensor([10000.0 ** -(k / 16) for k in range(16)]).double(), rtol=1e-6)


def test_sines_come_before_cosines_and_axes_are_time_height_width() -> None:
    table = rotary_table(coords((1, 1, 1), (5, 3, 3), (5, 3, 5)), rotary_bands(16))
    bands = [1.0, 0.01]
    expected = [a * b for a in (1.0, 0.0, 0.0) for b in bands]  # height and width: (1 - 1) · scale
    assert table.shape == (1, 12)
    assert torch.allclose(table[0, :6], torch.tensor(expected).sin())
    assert torch.allclose(table[0, 6:], torch.tensor(expected).cos())


def test_height_and_width_are_centered_and_time_is_not() -> None:
    assert torch.allclose(angles((1, 0, 2), (3, 3, 3), (3, 3, 3)), torch.tensor([1.0, -1.0, 1.0]))


def test_positions_are_scaled_to_the_reference_size() -> None:
    assert torch.allclose(angles((3, 0, 0), (5, 5, 3), (2, 2, 2)), torch.tensor([0.75, -0.5, -0.5]))


def test_text_has_no_position_unless_it_is_one_token_long() -> None:
    assert torch.equal(angles((-3, 0, 0), (4, 1, 1), (1, 1, 1)), torch.zeros(3))
    assert torch.allclose(angles((-1, 0, 0), (1, 1, 1), (1, 1, 1)), torch.tensor([-1.0, 0.0, 0.0]))


def test_positions_outside_the_grid_are_not_clamped() -> None:
    assert torch.allclose(angles((-1, 4, 0), (3, 3, 3), (3, 3, 3)), torch.tensor([-1.0, 3.0, -1.0]))


def test_an_axis_of_size_one_with_another_reference_size_is_refused() -> None:
    good, bad = coords((0, 0, 0), (2, 2, 2), (2, 2, 2)), coords((0, 0, 0), (1, 2, 2), (3, 2, 2))
    with pytest.raises(RequestError, match=r"Token 1 has size \[1.0, 2.0, 2.0\]"):
        rotary_table(torch.cat([good, bad]), rotary_bands(16))


def test_rotation_pairs_channels_half_of_the_rotated_width_apart_and_keeps_the_rest() -> None:
    x = torch.arange(16.0).view(1, 1, 16)
    table = torch.zeros(1, 12)  # angle 90 degrees: (a, b) -> (-b, a)
    table[:, :6] = 1
    rotated = rotate(x, table)[0, 0]
    assert torch.equal(rotated[:6], -torch.arange(6.0, 12.0))
    assert torch.equal(rotated[6:12], torch.arange(6.0))
    assert torch.equal(rotated[12:], torch.arange(12.0, 16.0))


def test_every_head_is_rotated_by_the_same_table() -> None:
    x = random(5, 1, 16).expand(5, 3, 16)
    table = rotary_table(random(5, 9).abs() + 2, rotary_bands(16))
    assert torch.equal(rotate(x, table), rotate(x[:, :1], table).expand(5, 3, 16))


# Runs


def test_runs_are_the_stretches_of_equal_modality() -> None:
    modality = torch.tensor([0, 0, 2, 1, 1, 1, 0])
    assert modality_runs(modality) == (Run(0, 0, 2), Run(2, 2, 3), Run(1, 3, 6), Run(0, 6, 7))
    assert modality_runs(modality[:0]) == ()


def test_pieces_cover_the_runs_in_order_with_a_limit_on_their_rows() -> None:
    assert pieces([Run(0, 0, 5), Run(1, 5, 6)], 2) == (Run(0, 0, 2), Run(0, 2, 4), Run(0, 4, 5), Run(1, 5, 6))


# Norm


def test_norm_weights_are_offsets_from_one() -> None:
    x = random(4, 8)
    expected = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(rms_norm(x, torch.zeros(8)), expected)
    assert torch.allclose(rms_norm(x, torch.ones(8)), 2 * expected)


def test_the_norm_of_tiny_values_shows_its_epsilon() -> None:
    x = torch.full((1, 4), 1e-3)  # mean square 1e-6, as large as the epsilon
    assert torch.allclose(rms_norm(x, torch.zeros(4)), torch.full((1, 4), math.sqrt(0.5)))


def test_a_norm_per_head_shares_its_weight_between_heads() -> None:
    x, weight = random(3, 2, 8), random(8, seed=1)
    assert torch.allclose(rms_norm(x, weight), torch.stack([rms_norm(x[:, h], weight) for h in (0, 1)], 1))


def test_norm_rounds_once() -> None:
    """A bf16 input normed in fp32 and rounded at the end, not before the weight is applied."""
    x, weight = random(64, 32, dtype=torch.bfloat16), random(32, seed=1)
    exact = _exact_norm(x, weight)
    assert torch.equal(rms_norm(x, weight), exact.to(torch.bfloat16))
    assert rms_norm(x, weight, dtype=torch.float32).dtype == torch.float32
    assert torch.allclose(rms_norm(x, weight, dtype=torch.float32).double(), exact, atol=1e-6)


def _exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x64 = x.double()
    return x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight.double() + 1)


def test_the_guard_turns_reduced_precision_off_and_back_on() -> None:
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv)
    before = [backend.fp32_precision for backend in backends]
    try:
        torch.set_float32_matmul_precision("medium")
        allowed = [backend.fp32_precision for backend in backends]
        assert allowed == ["tf32", "bf16", "tf32"]
        inside = []
        with contextlib.suppress(KeyError), true_fp32():
            inside = [backend.fp32_precision for backend in backends]
            raise KeyError  # restored also then
        assert inside == ["ieee"] * 3
        assert [backend.fp32_precision for backend in backends] == allowed
    finally:
        torch.set_float32_matmul_precision("highest")
        for backend, value in zip(backends, before, strict=True):
            backend.fp32_precision = value


# Activation


def test_gate_and_linear_channels_are_interleaved_and_the_linear_half_is_moved_by_one() -> None:
    gate, linear = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -3.0])
    x = torch.stack([gate, linear], 1).view(1, 4)
    expected = gate * torch.sigmoid(1.702 * gate) * (linear + 1)
    assert torch.allclose(swiglu7(x)[0], expected)
    assert torch.allclose(swiglu7_pair(gate, linear), expected)


def test_the_gate_is_clamped_above_only_and_the_linear_half_on_both_sides() -> None:
    def value(gate: float, linear: float) -> float:
        return swiglu7_pair(torch.tensor([gate]), torch.tensor([linear])).item()

    assert value(100.0, 0.0) == value(7.0, 0.0)
    assert value(-100.0, 0.0) != value(-7.0, 0.0)
    assert value(1.0, 100.0) == value(1.0, 7.0)
    assert value(1.0, -100.0) == value(1.0, -7.0)


def test_the_activation_rounds_once_and_keeps_the_dtype() -> None:
    x = 4 * random(64, 32, dtype=torch.bfloat16)
    exact = swiglu7(x.float())
    assert torch.equal(swiglu7(x), exact.to(torch.bfloat16))


def test_the_pair_leaves_its_arguments_alone() -> None:
    gate, linear = random(4, 4) * 10, random(4, 4, seed=1) * 10
    before = gate.clone(), linear.clone()
    swiglu7_pair(gate, linear)
    assert torch.equal(gate, before[0])
    assert torch.equal(linear, before[1])
