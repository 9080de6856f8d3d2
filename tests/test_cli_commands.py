"""The commands around a checkpoint: miniature, inspect, convert; and how wrong usage ends."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from magi2_native.headless import generate, run
from magi2_native.headless.arguments import devices, size
from magi2_native.headless.cli import main
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.sampling.guidance import HELP

SMALL = ["--hidden-size", "192", "--layers", "2", "--experts", "6", "--expert-width", "16", "--text-width", "32",
         "--text-layers", "4", "--text-merges", "64", "--refiner-layers", "1", "--turbo-width", "4",
         "--oobleck-width", "4"]  # fmt: skip


def test_miniature_writes_a_checkpoint_of_the_size_that_is_asked_for(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["miniature", str(tmp_path / "new" / "mini"), *SMALL]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "new" / "mini")
    name = "preview/model-00002-of-00003.safetensors"
    assert (tmp_path / "new" / "mini" / name).read_bytes() == (tiny / name).read_bytes()
    assert main(["miniature", str(tmp_path / "new" / "mini"), *SMALL, "--seed", "1"]) == 1
    assert "holds another miniature" in capsys.readouterr().err


def test_miniature_refuses_a_size_that_no_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["miniature", str(tmp_path / "mini"), "--hidden-size", "100"]) == 1
    assert capsys.readouterr().err == "hidden_size of a miniature is 100; it must be a multiple of 192.\n"
    assert not (tmp_path / "mini").exists()


def test_inspect_says_what_a_sound_checkpoint_can_make(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tiny)]) == 0
    assert "1080p                   possible" in capsys.readouterr().out
    assert main(["inspect", str(tiny), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["capabilities"] == {"T2VA": True, "I2VA": True, "1080p": True}
    assert report["ok"] is True


def test_inspect_fails_on_a_damaged_checkpoint(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    shard = copy / "refiner" / "model-00001-of-00003.safetensors"
    shard.write_bytes(b"")
    assert main(["inspect", str(copy)]) == 1
    assert "problem: refiner/model-00001-of-00003.safetensors" in capsys.readouterr().out
    assert main(["inspect", str(copy), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["problems"][0]["file"] == "refiner/model-00001-of-00003.safetensors"


def test_inspect_of_no_folder_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path / "gone")]) == 1
    assert "gone does not exist" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "gone"), "--json"]) == 1
    assert "gone does not exist" in json.loads(capsys.readouterr().out)["text"]


def test_inspect_shows_the_memory_of_a_resolution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without architecture files the released model is meant: 70 §5 gives its bytes per rank."""
    assert main(["inspect", str(tmp_path), "--plan", "1080p"]) == 1, "there are no weights"
    table = [line.split() for line in capsys.readouterr().out.splitlines() if " GB peak" in line]
    assert [(row[0], row[1], row[2]) for row in table] == [
        ("preview", "sp1", "228.1"), ("preview", "sp2", "119.3"), ("preview", "sp4", "64.9"),
        ("preview", "sp8", "37.8"), *(("refiner", f"sp{ranks}", "13.5") for ranks in (1, 2, 4, 8)),
    ]  # fmt: skip
    assert main(["inspect", str(tmp_path), "--plan", "272p", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan[0]["weights"] == 228_107_858_176
    assert plan[0]["peak"] > plan[0]["weights"]
    assert [row["layout"] for row in plan] == ["sp1", "sp2", "sp4", "sp8"]


def test_convert_writes_safetensors_and_the_checkpoint_stays_sound(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    assert main(["convert", str(copy)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert {path.parent.name for path in written} == {"vae", "turbo_vae"}
    assert all(path.suffix == ".safetensors" and path.is_file() for path in written)
    for pickled in (copy / "vae" / "Wan2.2_VAE.pth", copy / "turbo_vae" / "checkpoint.ckpt"):
        pickled.unlink(missing_ok=True)
    assert main(["inspect", str(copy)]) == 0


def test_wrong_usage_ends_with_2_and_names_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, told in (
        ([], "COMMAND"),
        (["generate", "x", "--prompt", "a", "--output", "a.mp4", "--resolution", "720p"], "'272p', '540p', '1080p'"),
        (["generate", "x", "--prompt", "a", "--output", "a.mp4", "--output-size", "wide"], "write it as 1920x1080"),
        (["generate", "x", "--prompt", "a"], "--output"),
        (["generate", "x", "--prompt", "a", "--output", "a.mp4", "--settings", "gone"], "there is no folder 'gone'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "workers", "expected"),
    [
        (None, None, None), ("cpu", None, ["cpu"]), ("cpu", 3, ["cpu"] * 3), ("cuda:1, cpu", None, ["cuda:1", "cpu"]),
        ("cuda:0,cuda:1,cuda:2", 2, ["cuda:0", "cuda:1"]),
    ],
)  # fmt: skip
def test_workers_and_devices_come_to_a_list(names: str | None, workers: int | None, expected: object) -> None:
    assert devices(names, workers) == expected


def test_workers_that_run_already_and_devices_of_this_host_exclude_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for machine in (["--device", "cpu"], ["--workers", "2"]):
        given = ["x", "--prompt", "a", "--output", "a.mp4", "--launch", "socket", *machine]
        assert main(["generate", *given]) == 1
        assert "leave out --device and --workers" in capsys.readouterr().err


def test_an_empty_device_list_is_refused_by_the_plan(tiny: Path) -> None:
    from magi2_native.magi2_core.memory.plan import make_plan

    with pytest.raises(RequestError, match="device list is empty"):
        make_plan(tiny, devices=devices(" , ", None))


def test_sizes_are_read_in_either_case() -> None:
    assert size("1920x1080") == size("1920X1080") == (1920, 1080)


def test_help_explains_every_option_of_the_guidance_as_the_nodes_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, sentence in HELP.items():
        assert f"--{name.replace('_', '-')}" in shown
        assert sentence in shown


def test_every_command_with_texts_of_the_user_takes_the_same_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []

    def run_workflow(workflow: Any, folders: Any, *_: Any) -> list[Path]:
        given.append(folders.user)
        return []

    monkeypatch.setattr(run, "run_workflow", run_workflow)
    workflow = Path(run.__file__).parents[1] / "workflows" / "api" / "text_to_clip.json"
    assert main(["run", str(workflow), "--models", str(tmp_path), "--settings", str(tmp_path)]) == 0
    assert given == [tmp_path]
    (tmp_path / "magi2_enhance.json").write_text("broken")
    assert main(["enhance", "a boat", "--settings", str(tmp_path)]) == 1
    assert "magi2_enhance.json is not a JSON object" in capsys.readouterr().err


def test_help_describes_every_command() -> None:
    """In a process of its own, as it is typed."""
    command = [sys.executable, "-m", "magi2_native.headless.cli", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 0
    for command in ("generate", "run", "queue", "inspect", "convert", "miniature", "enhance"):
        assert command in shown.stdout


def test_a_name_that_the_terminal_has_no_letters_for_is_printed_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "magi2_native.headless.cli", "inspect", str(tmp_path / "日本")]
    (tmp_path / "日本").mkdir()
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert r"\u65e5\u672c" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "~nobody-here/x"],
        ["miniature", "~nobody-here/x"],
        ["run", "~nobody-here/x", "--models", "m"],
        ["generate", "m", "--prompt", "a", "--output", "~nobody-here/x.mp4"],
        ["enhance", "a", "--settings", "~nobody-here/x"],
        ["generate", "m", "--prompt-file", "", "--output", "x.mp4"],
    ],
)
def test_a_path_that_names_nothing_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "There is no folder ~nobody-here; write" in said or "The path is empty" in said


def test_the_second_stage_is_given_the_attention_that_was_chosen(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[Any] = []

    def keep(request: Any, *_: Any) -> Any:
        requests.append(request)
        raise RequestError("that is all")

    monkeypatch.setattr(generate, "generate", keep)
    arguments = ["generate", str(tiny), "--prompt", "a", "--output", str(tmp_path / "x.mp4"), "--device", "cpu"]
    assert main([*arguments, "--refiner-attention", "gather"]) == main(arguments) == 1
    assert [request.refiner.attention for request in requests] == ["gather", "auto"]
    with pytest.raises(SystemExit):
        main([*arguments, "--refiner-attention", "magic"])
    assert "flex" in capsys.readouterr().err
