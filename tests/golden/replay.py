"""Replay recorded results: run every case of a folder through this code and compare within the stated tolerances.

    python -m magi2_native.tests.golden.replay FOLDER

FOLDER holds one folder for each part (dit, sampling, text, vae, refiner), or is one of them. A case is a JSON file,
with its tensors, if it has any, in the safetensors file of the same name. Beside cases a part may hold checkpoints that
they read: folders with `model.safetensors` or its index. One line is printed for each case with its worst measured
error and the tolerance; the last line counts. The exit code is 1 if any case failed. A case of a family that the code
does not know fails, and so does any other file but texts (.md, .txt, README and the like) and hidden ones: nothing
passes unseen.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ...magi2_core.dit.norm import rms_norm
from ...magi2_core.dit.runs import MODALITIES, Run, block

PARTS = ("dit", "sampling", "text", "vae", "refiner")
_CHECKPOINT = "*/model.safetensors*"  # an index of shards, or the one file


@dataclass(frozen=True)
class Measure:
    """One comparison of a case; it holds when `error <= tolerance`, so a NaN fails."""

    what: str
    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Case:
    """One recorded case: the JSON's content is `meta`, its tensors (keys in.*, mid.*, out.*, weights.*) `tensors`."""

    part: str
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def folder(self) -> Path:
        return self.path.parent

    @cached_property
    def meta(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        file = self.path.with_suffix(".safetensors")
        return load_file(file) if file.exists() else {}


def norm_by_modality(x: Tensor, weight: Tensor, runs: Iterable[Run], dtype: torch.dtype | None = None) -> Tensor:
    """The norm of rows that lie in runs of one modality each, by a weight with a block for each modality."""
    return torch.cat([rms_norm(x[run.rows], block(weight, run.modality, MODALITIES), dtype) for run in runs])


def linear_by_modality(x: Tensor, weight: Tensor, runs: Iterable[Run], bias: Tensor | None = None) -> Tensor:
    """The product of rows that lie in runs of one modality each, with a block of the weight for each modality."""

    def part(of: Tensor, run: Run) -> Tensor:
        return block(of, run.modality, MODALITIES)

    return torch.cat(
        [F.linear(x[run.rows], part(weight, run), None if bias is None else part(bias, run)) for run in runs]
    )


def equal(what: str, got: Any, expected: Any) -> Measure:
    """An exact comparison of plain values or tensors, as a measure of 0 or infinity."""
    if isinstance(expected, Tensor):
        same = isinstance(got, Tensor) and got.shape == expected.shape and torch.equal(got.to(expected.dtype), expected)
    else:
        same = got == expected
    return Measure(what, 0.0 if same else math.inf, 0.0)


def max_abs(what: str, got: Tensor, expected: Tensor, tolerance: float) -> Measure:
    """Largest absolute difference; infinite if the shapes differ."""
    if got.shape != expected.shape:
        return Measure(f"{what} shape {tuple(got.shape)} for {tuple(expected.shape)}", math.inf, tolerance)
    if expected.numel() == 0:
        return Measure(what, 0.0, tolerance)
    return Measure(what, (got.double() - expected.double()).abs().max().item(), tolerance)


def rel_l2(what: str, got: Tensor, expected: Tensor, tolerance: float) -> Measure:
    """Relative L2 distance; infinite if the shapes differ."""
    if got.shape != expected.shape:
        return Measure(f"{what} shape {tuple(got.shape)} for {tuple(expected.shape)}", math.inf, tolerance)
    norm = expected.double().norm().item()
    difference = (got.double() - expected.double()).norm().item()
    return Measure(what, difference / norm if norm else difference, tolerance)


def close(what: str, got: Tensor, expected: Tensor, limits: Mapping[str, float]) -> Measure:
    """|got - expected| <= atol + rtol·|expected|: the worst element as a share of what it is allowed."""
    if got.shape != expected.shape:
        return Measure(f"{what} shape {tuple(got.shape)} for {tuple(expected.shape)}", math.inf, 1.0)
    difference = (got.double() - expected.double()).abs()
    shares = (difference / (limits["atol"] + limits["rtol"] * expected.double().abs())).where(difference != 0, 0.0)
    return Measure(f"{what}, share of the limit", shares.max().item() if shares.numel() else 0.0, 1.0)


def find_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of a folder of parts, or of one part, in name order."""
    parts = [p for p in PARTS if (folder / p).is_dir()]
    places = [(p, folder / p) for p in parts] or [(_part_of(folder), folder)]
    for part, place in places:
        for path in sorted(place.glob("*.json")):
            yield Case(part, path)


def find_strays(folder: Path) -> list[str]:
    """The files of a folder that no case accounts for, without suffixes and relative to it, in name order."""
    cases = list(find_cases(folder))
    seen = {path for case in cases for path in (case.path, case.path.with_suffix(".safetensors"))}
    checkpoints = {path.parent for part in {case.folder for case in cases} for path in part.glob(_CHECKPOINT)}
    return sorted({
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() and path not in seen and path.parent not in checkpoints and not _is_text(path, folder)
    })  # fmt: skip


def _is_text(path: Path, folder: Path) -> bool:
    """Whether a file is for people, or hidden, and so certainly no case."""
    hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
    return hidden or path.suffix.lower() in (".md", ".txt", ".rst") or (not path.suffix and path.name.isupper())


def _part_of(folder: Path) -> str:
    name = folder.resolve().name
    if name not in PARTS:
        raise SystemExit(f"{folder} holds none of the folders {', '.join(PARTS)} and is not named like one of them.")
    return name


def run_case(case: Case) -> list[Measure]:
    """Run one case by the replay module of its part."""
    module = importlib.import_module(f".replay_{case.part}", __package__)
    with torch.inference_mode():
        measures: list[Measure] = module.run(case)
    return measures or [Measure("the case compared nothing", math.inf, 0.0)]


def report(case: Case) -> bool:
    """Run a case, print its line, and say whether it passed."""
    try:
        measures = run_case(case)
    except Exception as error:  # any failure of a case is a failed case; the replay goes on
        print(f"FAIL {case.part}/{case.name}: {type(error).__name__}: {error}", flush=True)
        traceback.print_exc(file=sys.stderr)
        return False
    failed = [m for m in measures if not m.holds]
    worst = max(failed or measures, key=lambda m: m.error / m.tolerance if m.tolerance else m.error)
    mark = "FAIL" if failed else "ok  "
    print(f"{mark} {case.part}/{case.name}: {worst.what}: error {worst.error:.3g}, tolerance {worst.tolerance:.3g}"
          f" ({len(measures)} comparisons)", flush=True)
    return not failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Replay recorded results against this code.")
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    results = [report(case) for case in find_cases(folder)]
    for stray in find_strays(folder):
        print(f"FAIL {stray}: no case of the parts {', '.join(PARTS)}: a JSON file in the folder of its part")
        results.append(False)
    passed = sum(results)
    print(f"{passed} passed, {len(results) - passed} failed")
    return 0 if results and passed == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
