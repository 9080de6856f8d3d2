"""Every recorded case passes within its own tolerance, and the replay passes over none."""

import shutil
from pathlib import Path

import pytest
from magi2_native.tests.golden.replay import Case, find_cases, find_strays, main, run_case

FOLDER = Path(__file__).parent / "cases"
CASES = list(find_cases(FOLDER))


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.part}-{c.name}")
def test_recorded_case(case: Case) -> None:
    failed = [m for m in run_case(case) if not m.holds]
    assert not failed, "\n".join(f"{m.what}: error {m.error:.3g} > {m.tolerance:.3g}" for m in failed)


def test_every_recorded_file_belongs_to_a_case() -> None:
    assert find_strays(FOLDER) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sampling").mkdir()
    shutil.copy(FOLDER / "sampling" / "geometry.json", tmp_path / "sampling")
    return tmp_path


@pytest.mark.parametrize(
    "file",
    ["new/a.json", "a.json", "sampling/b.JSON", "sampling/b.safetensors", "sampling/b.pt", "sampling/deep/b.json",
     "new/deep/model.safetensors"],
)  # fmt: skip
def test_a_file_that_no_case_accounts_for_fails(folder: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text("{}")
    assert main([str(folder)]) == 1
    said = capsys.readouterr().out
    assert f"FAIL {file.rpartition('.')[0]}: " in said
    assert said.endswith("1 passed, 1 failed\n")


def test_texts_for_people_and_the_checkpoints_of_cases_are_no_failures(folder: Path) -> None:
    (folder / "sampling" / "tiny").mkdir()
    for name in ("FORMAT.md", "README", "sampling/notes.txt", ".DS_Store", "sampling/tiny/config.json",
                 "sampling/tiny/model.safetensors.index.json"):  # fmt: skip
        (folder / name).touch()
    assert main([str(folder)]) == 0
