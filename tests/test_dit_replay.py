"""The replay of recorded transformer results fails where it should (10 §13)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from magi2_native.tests.golden.limits import judge, missed
from magi2_native.tests.golden.replay import Case, report
from magi2_native.tests.golden.replay_dit import run
from safetensors.torch import load_file, save_file
from torch import Tensor

CASES = Path(__file__).parent / "golden" / "cases" / "dit"


def case_of(folder: Path, limits: dict[str, float], expected: Tensor) -> Case:
    (folder / "case.json").write_text(json.dumps({"tolerance": {"out.*": limits}}))
    save_file({"out.y": expected}, folder / "case.safetensors")
    return Case("dit", folder / "case.json")


@pytest.mark.parametrize(
    ("limits", "near", "far"),
    [
        ({"atol": 0.1}, 0.09, 0.11),
        ({"atol": 0.1, "rtol": 0.1}, 0.29, 0.31),
        ({"max_ulp_bf16": 2}, 2 * 2**-6, 3 * 2**-6),  # a bf16 step at 2 is 2^-6
        ({"max_ulp_bf16": 2, "atol": 0.1}, 0.09, 0.11),  # whichever is met
        ({"max_abs": 0.1}, 0.09, 0.11),
        ({"rel_l2": 0.05}, 0.09, 0.11),
        ({"median_token_rel_l2": 0.05}, 0.09, 0.11),
    ],
)
def test_every_kind_of_limit_holds_up_to_its_value(
    tmp_path: Path, limits: dict[str, float], near: float, far: float
) -> None:
    expected = torch.full((3, 1), 2.0)
    case = case_of(tmp_path, limits, expected)
    assert all(m.holds for m in judge(case, "out.y", expected + near))
    assert not all(m.holds for m in judge(case, "out.y", expected + far))
    assert not all(m.holds for m in judge(case, "out.y", expected * math.nan))
    assert not all(m.holds for m in judge(case, "out.y", expected[:2]))


def test_a_limit_of_an_unknown_kind_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    case = case_of(tmp_path, {"cosine": 0.9}, torch.ones(2))
    with pytest.raises(KeyError, match="unknown kind"):
        judge(case, "out.y", torch.ones(2))
    case.meta["tolerance"].clear()
    with pytest.raises(KeyError, match="states no tolerance"):
        judge(case, "out.y", torch.ones(2))


def test_an_output_that_was_not_compared_is_a_failure(tmp_path: Path) -> None:
    case = case_of(tmp_path, {"atol": 0.1}, torch.ones(2))
    assert not missed(case, judge(case, "out.y", torch.ones(2)))
    assert [m.holds for m in missed(case, [])] == [False]


def test_a_family_that_is_not_known_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "op_unheard_of.json").write_text("{}")
    with pytest.raises(KeyError, match="op_unheard_of"):
        run(Case("dit", tmp_path / "op_unheard_of.json"))


@pytest.mark.parametrize("name", ["op_mhc", "op_moe_core_h4", "layer_moe", "par_exchange"])
def test_a_recorded_output_that_is_changed_fails_its_case(tmp_path: Path, name: str) -> None:
    tensors = load_file(CASES / f"{name}.safetensors")
    key = max(key for key in tensors if key.startswith("out."))
    tensors[key] = tensors[key] + 2
    save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / f"{name}.json").write_text((CASES / f"{name}.json").read_text())
    assert report(Case("dit", CASES / f"{name}.json"))
    assert not report(Case("dit", tmp_path / f"{name}.json"))
