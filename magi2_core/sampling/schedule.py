"""The table of noise levels that a clip passes through, and the time that the model is told (20 §3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import RequestError

TRAINING_STEPS = 1000
MOST_STEPS = TRAINING_STEPS  # more would repeat timesteps
SIGMA_MAX = 0.9990000128746033  # float32(1 - 1/1000)


@dataclass(frozen=True)
class Schedule:
    """Noise levels and timesteps of N steps.

    sigmas: fp32 [N+1] on the CPU, strictly falling, the last one 0. timesteps: N integers, truncated, which may repeat;
    steps are counted, never looked up by timestep.
    """

    sigmas: Tensor
    timesteps: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.timesteps)

    def time(self, step: int) -> float:
        """Diffusion time tau of a step, an fp32 value: the truncated timestep over 1000, not sigma (20 §3)."""
        return (torch.tensor(self.timesteps[step], dtype=torch.float32) / TRAINING_STEPS).item()


def make_schedule(steps: int, shift: float) -> Schedule:
    """The flow schedule of `steps` steps with a shift (20 §3).

    Raises RequestError for steps that are not 1 to 1000, for a shift that is not finite and positive, and for a pair so
    extreme that two noise levels coincide in fp32, which the solver would divide by (20 §9).
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MOST_STEPS:
        raise RequestError(f"The number of steps is {steps!r}; it must be a whole number, 1 to {MOST_STEPS}.")
    if not math.isfinite(shift) or shift <= 0:
        raise RequestError(f"The schedule shift is {shift}; it must be a finite number above 0 (1 is linear).")
    stride = -SIGMA_MAX / steps
    linear = [step * stride + SIGMA_MAX for step in range(steps)]  # Python floats are the float64 of the reference
    shifted = [shift * s / (1 + (shift - 1) * s) for s in linear]
    sigmas = torch.tensor([*shifted, 0.0], dtype=torch.float64).to(torch.float32)
    if sigmas[0] >= 1 or (sigmas[:-1] <= sigmas[1:]).any():
        raise RequestError(
            f"{steps} steps with a shift of {shift} put two noise levels on the same fp32 value;"
            " use fewer steps or a shift nearer to 1."
        )
    return Schedule(sigmas, tuple(int(s * TRAINING_STEPS) for s in shifted))
