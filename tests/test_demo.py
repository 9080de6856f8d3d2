"""`./demo` without ComfyUI: the shipped workflows through `magi2 run`, with a pool that has no processes."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import magi2_native.distributed.pool as pool_module
import pytest
from magi2_native.headless import cli, commands, demo
from magi2_native.stages.manager import manager
from magi2_native.tests.comfy_stub.fake_pool import FakePool
from magi2_native.tests.comfy_stub.fixtures import write_checkpoint


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    def write(checkpoint: Path, **_: Any) -> None:
        if not checkpoint.exists():
            write_checkpoint(checkpoint)

    monkeypatch.setattr(demo, "write_miniature", write)
    monkeypatch.setattr(manager, "_make_pool", lambda model: FakePool(model, pool_module))
    monkeypatch.setattr("sys.argv", ["demo", "--output", str(tmp_path / "out"), "--steps", "1"])
    yield demo.main
    manager.stop()


def test_both_shipped_workflows_are_run_by_commands_that_can_be_copied(
    run: Callable[[], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    printed = capsys.readouterr().out
    assert printed.count("checked by decoding it: 125 frames of 448x256") == 2
    copied = [shlex.split(line) for line in printed.splitlines() if " run " in line and "--output" in line]
    assert [Path(command[2]) for command in copied] == [
        demo.WORKFLOWS / f"{name}.json" for name in ("text_to_clip", "picture_to_clip")
    ]
    for command in copied:
        options = commands._parser().parse_args(command[1:])
        assert "Magi2Sampler.steps=1" in options.assignments
        assert "Magi2LoadCheckpoint.devices=2xcpu" in options.assignments
    assert cli.main(copied[0][1:]) == 0, "a copy of the command works"
    assert run() == 0, "it can be run again"
    clips = sorted(path.relative_to(tmp_path / "out").as_posix() for path in tmp_path.rglob("*.mp4"))
    assert clips == [
        *(f"picture_to_clip/video/magi2_0000{number}_.mp4" for number in (1, 2)),
        *(f"text_to_clip/video/magi2_0000{number}_.mp4" for number in (1, 2, 3)),
    ]


def test_a_clip_with_other_counts_or_a_command_that_fails_ends_the_demo(
    run: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "EXPECTED", (124, *demo.EXPECTED[1:]))
    assert run() == 1
    assert "FAILED: " in (err := capsys.readouterr().err)
    assert "holds (frames, width, height, fps, samples, Hz, channels) (125, 448, 256" in err
    monkeypatch.setattr(demo, "magi2", lambda arguments: 1)
    assert run() == 1
    assert "FAILED: The command above ended with an error." in capsys.readouterr().err
    monkeypatch.setattr(demo, "magi2", lambda arguments: 130)
    assert run() == 130
