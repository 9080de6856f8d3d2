"""The schedule and the solver (20 §3, §4)."""

import math

import pytest
import torch
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.sampling.schedule import make_schedule
from magi2_native.magi2_core.sampling.unipc import UniPC, predictor_order


@pytest.mark.parametrize(
    ("steps", "timesteps"),
    [
        (1, (999,)),
        (2, (999, 874)),
        (3, (999, 933, 777)),
        (4, (999, 954, 874, 699)),
        (8, (999, 979, 954, 920, 874, 807, 699, 499)),
    ],
)
def test_the_timesteps_are_those_of_the_released_shift(steps: int, timesteps: tuple[int, ...]) -> None:
    assert make_schedule(steps, 7.0).timesteps == timesteps


def test_the_noise_levels_are_fp32_and_end_at_zero() -> None:
    sigmas = make_schedule(4, 7.0).sigmas
    assert sigmas.dtype == torch.float32
    assert sigmas.tolist() == pytest.approx([0.99985701, 0.95437175, 0.87478107, 0.69971985, 0], abs=1e-8)


def test_the_refiner_schedule_is_the_same_formula_with_its_own_shift() -> None:
    schedule = make_schedule(5, 5.0)
    assert schedule.timesteps == (999, 952, 882, 768, 555)
    expected = [0.99979985, 0.95215404, 0.88209325, 0.76893473, 0.55524677, 0]
    assert schedule.sigmas.tolist() == pytest.approx(expected, abs=1e-8)


def test_a_shift_of_one_is_linear() -> None:
    sigmas = make_schedule(10, 1.0).sigmas
    assert torch.allclose(sigmas.diff(), torch.full((10,), -0.0999), atol=1e-6)


def test_the_model_is_told_the_truncated_timestep_not_the_noise_level() -> None:
    schedule = make_schedule(4, 7.0)
    assert schedule.time(1) == (torch.tensor(954.0) / 1000).item() != schedule.sigmas[1].item()


@pytest.mark.parametrize("steps", [168, 500, 1000])
def test_repeated_timesteps_do_not_limit_the_number_of_steps(steps: int) -> None:
    schedule = make_schedule(steps, 7.0)
    assert schedule.timesteps[0] == schedule.timesteps[1]
    sample, solver = torch.ones(3), UniPC(schedule)
    for sigma in schedule.sigmas[:-1]:
        sample = solver.step((sample - 0.25) / sigma, sample)
    assert torch.allclose(sample, torch.full((3,), 0.25), atol=1e-5)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, None])
def test_a_step_count_below_one_or_not_whole_is_refused(steps: object) -> None:
    with pytest.raises(RequestError, match="number of steps"):
        make_schedule(steps, 7.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("shift", [0.0, -1.0, math.nan, math.inf])
def test_a_shift_that_is_not_finite_and_positive_is_refused(shift: float) -> None:
    with pytest.raises(RequestError, match="finite number above 0"):
        make_schedule(4, shift)


@pytest.mark.parametrize(("steps", "shift"), [(1, 1e9), (4, 1e9), (1000, 20000.0), (3, 1e-60)])
def test_levels_that_coincide_in_fp32_are_refused(steps: int, shift: float) -> None:
    with pytest.raises(RequestError, match="same fp32 value"):
        make_schedule(steps, shift)


@pytest.mark.parametrize(
    ("steps", "orders"), [(1, [1]), (2, [1, 1]), (3, [1, 2, 1]), (6, [1, 2, 2, 2, 2, 1])]
)
def test_the_first_and_the_last_step_are_of_order_one(steps: int, orders: list[int]) -> None:
    assert [predictor_order(k, steps) for k in range(steps)] == orders


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_a_constant_data_prediction_is_reached_exactly(steps: int) -> None:
    """On the straight path to one point every order is exact: sample k is (1 - sigma) data + sigma noise."""
    generator = torch.Generator().manual_seed(1)
    noise, data = torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)
    schedule = make_schedule(steps, 7.0)
    solver, sample = UniPC(schedule), (1 - schedule.sigmas[0]) * data + schedule.sigmas[0] * noise
    for sigma in schedule.sigmas[1:]:
        sample = solver.step(noise - data, sample)
        assert torch.allclose(sample, (1 - sigma) * data + sigma * noise, atol=1e-5)
    assert torch.isfinite(sample).all()


def test_one_step_is_an_euler_step_to_clean() -> None:
    schedule = make_schedule(1, 7.0)
    sample, velocity = torch.randn(2, 6)
    assert torch.equal(UniPC(schedule).step(velocity, sample), sample - schedule.sigmas[0] * velocity)


def test_the_last_step_returns_the_prediction_of_the_uncorrected_sample() -> None:
    schedule = make_schedule(4, 7.0)
    solver, sample = UniPC(schedule), torch.randn(6)
    for _ in range(4):
        before, velocity = sample, torch.randn(6)
        sample = solver.step(velocity, sample)
    assert torch.equal(sample, before - schedule.sigmas[3] * velocity)
    assert not torch.equal(solver.corrected, before)


def test_halving_the_steps_costs_more_than_a_first_order_solver_would_lose() -> None:
    """For data predicted as a fixed multiple c of the sample the path is sigma^(1-c)."""
    c = 0.3

    def error(steps: int) -> float:
        schedule = make_schedule(steps, 1.0)
        solver, sample = UniPC(schedule), torch.ones(1, dtype=torch.float64)
        for sigma in schedule.sigmas[: steps // 2]:
            sample = solver.step((sample - c * sample) / sigma, sample)
        exact = (schedule.sigmas[steps // 2].double() / schedule.sigmas[0].double()) ** (1 - c)
        return (sample - exact).abs().item()

    assert error(40) < error(20) / 3 < 1e-3


def test_a_bf16_velocity_is_scaled_in_bf16_and_the_sample_stays_fp32() -> None:
    schedule = make_schedule(2, 7.0)
    sample, velocity = torch.randn(64), torch.randn(64).bfloat16()
    solver = UniPC(schedule)
    assert solver.step(velocity, sample).dtype == torch.float32
    assert torch.equal(solver.prediction, sample - (schedule.sigmas[0] * velocity))
