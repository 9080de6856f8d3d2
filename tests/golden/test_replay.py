"""Every recorded case passes within its own tolerance."""

from pathlib import Path

import pytest
from magi2_native.tests.golden.replay import Case, find_cases, run_case

CASES = list(find_cases(Path(__file__).parent / "cases"))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.part}-{c.name}")
def test_recorded_case(case: Case) -> None:
    failed = [m for m in run_case(case) if not m.holds]
    assert not failed, "\n".join(f"{m.what}: error {m.error:.3g} > {m.tolerance:.3g}" for m in failed)
