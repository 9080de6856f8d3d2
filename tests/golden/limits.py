"""Comparison with a recorded tensor by the limits that its case states (10 §13)."""

from __future__ import annotations

import math
from fnmatch import fnmatch

import torch
from torch import Tensor

from .replay import Case, Measure, equal, max_abs, rel_l2


def judge(case: Case, key: str, got: Tensor) -> list[Measure]:
    """Compare with a recorded tensor by the limits of the first pattern in the case's `tolerance` that fits its key.

    A tensor that the case does not have compares nothing.
    """
    if key not in case.tensors:
        return []
    expected = case.tensors[key]
    stated = [limits for pattern, limits in case.meta["tolerance"].items() if fnmatch(key, pattern)]
    if not stated:
        raise KeyError(f"{case.name} states no tolerance for {key}")
    if got.shape != expected.shape:
        return [Measure(f"{key} shape {tuple(got.shape)} for {tuple(expected.shape)}", math.inf, 0.0)]
    limits = dict(stated[0])
    if limits.pop("exact", False):
        return [equal(key, got, expected)]
    measures = []
    if {"atol", "rtol", "max_ulp_bf16"} & limits.keys():
        measures.append(_elementwise(key, got, expected, limits))
    if "max_abs" in limits:
        measures.append(max_abs(key, got, expected, limits.pop("max_abs")))
    if "rel_l2" in limits:
        measures.append(rel_l2(key, got, expected, limits.pop("rel_l2")))
    if "median_token_rel_l2" in limits:
        measures.append(median_token(key, got, expected, limits.pop("median_token_rel_l2")))
    if limits:
        raise KeyError(f"{case.name} has a limit of an unknown kind for {key}: {limits}")
    return measures


def missed(case: Case, measures: list[Measure]) -> list[Measure]:
    """A failure for every recorded output that no measure names: a replay must not pass by looking away."""
    compared = [measure.what for measure in measures]
    outputs = [key for key in case.tensors if key.startswith("out.")]
    unseen = [key for key in outputs if not any(key in what for what in compared)]
    return [Measure(f"{key} was not compared", math.inf, 0.0) for key in unseen]


def _elementwise(key: str, got: Tensor, expected: Tensor, limits: dict[str, float]) -> Measure:
    """The worst element as a share of what it is allowed: atol + rtol·|expected|, or a number of bf16 steps, whichever
    is met (10 §13)."""
    difference = (got.double() - expected.double()).abs()
    shares = []
    if {"atol", "rtol"} & limits.keys():
        shares.append(difference / (limits.pop("atol", 0.0) + limits.pop("rtol", 0.0) * expected.double().abs()))
    if "max_ulp_bf16" in limits:
        shares.append(bf16_steps(got, expected) / limits.pop("max_ulp_bf16"))
    shares = [share.where(difference != 0, 0.0) for share in shares]
    worst = torch.stack(shares).amin(0)
    return Measure(f"{key}, share of the limit", worst.max().item() if worst.numel() else 0.0, 1.0)


def bf16_steps(got: Tensor, expected: Tensor) -> Tensor:
    """How many bf16 values lie between two tensors; infinite where `got` is not finite."""
    ordered = []
    for x in (got, expected):
        bits = x.to(torch.bfloat16).view(torch.int16).int()
        ordered.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    steps = (ordered[0] - ordered[1]).abs().double()
    return steps.where(got.isfinite(), math.inf)


def median_token(key: str, got: Tensor, expected: Tensor, tolerance: float) -> Measure:
    """Median over the rows that are not zero of the relative error of a row (10 §13)."""
    norm = expected.double().norm(dim=1)
    error = (got.double() - expected.double()).norm(dim=1)[norm > 0] / norm[norm > 0]
    if not error.isfinite().all():
        return Measure(f"{key} median token", math.inf, tolerance)
    return Measure(f"{key} median token", error.median().item(), tolerance)
