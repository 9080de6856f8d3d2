"""The solver: UniPC of order 2 (`bh2`) on a straight path, one object for each modality (20 §4, 50 §9)."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .schedule import Schedule


def predictor_order(step: int, steps: int) -> int:
    """Order of the predictor: 1 at the first and the last step, 2 between (20 §4, 3)."""
    return min(2, steps - step, step + 1)


class UniPC:
    """State of one trajectory; make a new one for each sample and modality.

    Its scalars are zero-dimensional fp32 tensors on the CPU: they keep the sample's dtype and cost no device read.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.sigmas = schedule.sigmas
        self.lambdas = torch.log(1 - self.sigmas) - torch.log(self.sigmas)  # the last one is infinite
        self.steps = schedule.steps
        self.steps_done = 0
        self.predictions: deque[Tensor] = deque(maxlen=3)  # x0 of the last steps, the newest last
        self.corrected: Tensor | None = None  # the sample that the last step started from

    @property
    def prediction(self) -> Tensor:
        """The newest estimate of the clean sample."""
        return self.predictions[-1]

    def step(self, velocity: Tensor, sample: Tensor) -> Tensor:
        """Move `sample` to the next noise level with the guided velocity (noise - data) found at its own level.

        Both have one shape; the result has the sample's dtype. A bf16 velocity is scaled in bf16 (20 §12).
        """
        k = self.steps_done
        # 20 §4, 1: x0 comes from the sample before correction and is never recomputed
        self.predictions.append(sample - self.sigmas[k] * velocity)
        self.corrected = self._correct(k, self.corrected) if self.corrected is not None else sample
        self.steps_done += 1
        return self._predict(k, self.corrected).to(sample.dtype)

    def _correct(self, k: int, last: Tensor) -> Tensor:
        """The sample of level k again, now that x0 is known there, in the order of the last predictor (20 §4, 2)."""
        start = self._start(k - 1, k, last, self.predictions[-2])
        rise = self.predictions[-1] - self.predictions[-2]
        if predictor_order(k - 1, self.steps) == 1:
            return start - self._weight(k - 1, k) * (0.5 * rise)
        h = self.lambdas[k] - self.lambdas[k - 1]
        r, slope = self._slope(k - 1, h, self.predictions[-3], self.predictions[-2])
        b = torch.expm1(-h)
        f1 = b / -h - 1
        f2 = f1 / -h - 0.5
        matrix = torch.stack([torch.ones(2), torch.stack([r, torch.tensor(1.0)])])
        rho = torch.linalg.solve(matrix, torch.stack([f1 / b, 2 * f2 / b]))
        return start - self._weight(k - 1, k) * (rho[0] * slope + rho[1] * rise)

    def _predict(self, k: int, sample: Tensor) -> Tensor:
        """The sample of level k+1 (20 §4, 5)."""
        # at the last step h is infinite and sigma 0, so this is the prediction itself; order 2 there would be inf * 0
        start = self._start(k, k + 1, sample, self.prediction)
        if predictor_order(k, self.steps) == 1:
            return start
        h = self.lambdas[k + 1] - self.lambdas[k]
        _, slope = self._slope(k, h, self.predictions[-2], self.prediction)
        return start - self._weight(k, k + 1) * (0.5 * slope)

    def _start(self, here: int, there: int, sample: Tensor, prediction: Tensor) -> Tensor:
        """The first-order move between two levels."""
        return (self.sigmas[there] / self.sigmas[here]) * sample - self._weight(here, there) * prediction

    def _weight(self, here: int, there: int) -> Tensor:
        return (1 - self.sigmas[there]) * torch.expm1(self.lambdas[here] - self.lambdas[there])

    def _slope(self, here: int, h: Tensor, before: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
        """Ratio of the last step's length to this one's, negative, and the difference quotient of x0 over it."""
        r = (self.lambdas[here - 1] - self.lambdas[here]) / h
        return r, (before - now) / r
