"""Files that appear when they are finished."""

import os
from pathlib import Path

import pytest
from magi2_native.magi2_core.files import replacing


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_finished_file_is_readable_by_whom_the_user_lets_read(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "file") as partial:
            partial.write_bytes(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
