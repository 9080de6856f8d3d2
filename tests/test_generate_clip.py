"""`magi2 generate` from the command line to the finished file, at sizes that take seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.headless import demo
from magi2_native.headless.cli import main
from magi2_native.headless.session import LocalSession
from magi2_native.magi2_core.codecs.media import Sound, read_back, write_video
from magi2_native.magi2_core.errors import Magi2Error
from magi2_native.magi2_core.sampling.geometry import TIERS, Tier
from PIL import Image

Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiers in small; everything else is as it is."""
    monkeypatch.setitem(TIERS, "272p", Tier((64, 32)))
    monkeypatch.setitem(TIERS, "1080p", Tier((64, 32), refined=(96, 64)))


@pytest.fixture
def generate(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Lines]:
    """Runs `magi2 generate --json`; returns what it printed."""

    def run(*extra: str, prompt: str = "A boat", code: int = 0) -> Lines:
        output = str(tmp_path / "clip.mp4")
        given = [str(tiny), "--prompt", prompt, "--output", output, "--device", "cpu", "--resolution", "272p"]
        assert main(["generate", *given, "--steps", "2", "--refiner-steps", "1", "--json", *extra]) == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_a_prompt_becomes_a_clip_with_sound(generate: Callable[..., Lines], tmp_path: Path) -> None:
    lines = generate("--seed", str(2**64 - 1))
    result = lines[-1]
    facts = read_back(tmp_path / "clip.mp4")
    assert (facts.frames, facts.width, facts.height, facts.frame_rate) == (125, 64, 32, Fraction(25, 2))
    assert (facts.samples, facts.sample_rate, facts.channels) == (441_000, 44_100, 2)
    assert result["event"] == "result"
    assert result["path"] == str(tmp_path / "clip.mp4")
    assert (result["frames"], result["samples"], result["fps"], result["seed"]) == (125, 441_000, "25/2", 2**64 - 1)
    assert result["seconds"].keys() == {"encode_text", "sample", "decode_audio", "write_clip"}
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_progress_runs_through_every_stage_to_its_end(generate: Callable[..., Lines]) -> None:
    ticks = [line for line in generate() if line["event"] == "progress"]
    last = {tick["stage"]: (tick["done"], tick["total"], tick["seconds_left"]) for tick in ticks}
    assert set(last) == {"load", "encode_text", "sample", "decode_audio", "decode_video"}
    assert all(done == total and left == 0 for done, total, left in last.values())
    assert last["sample"][:2] == (2, 2)


def test_the_same_request_gives_the_same_file_and_another_seed_another(
    generate: Callable[..., Lines], tmp_path: Path
) -> None:
    files = []
    for seed in ("1", "1", "2"):
        generate("--seed", seed)
        files.append((tmp_path / "clip.mp4").read_bytes())
    assert files[0] == files[1] != files[2]


WRITE = """
import sys, torch
from fractions import Fraction
from magi2_native.magi2_core.codecs.media import write_video
shades = torch.rand(1, 3, 9, 4, 6, generator=torch.Generator().manual_seed(0))
frames = torch.nn.functional.interpolate(shades, size=(30, 64, 96), mode="trilinear")[0].permute(1, 2, 3, 0)
write_video(sys.argv[1], [(255 * frames).to(torch.uint8)], Fraction(25, 2))
"""


def test_a_file_does_not_depend_on_what_memory_held_before(tmp_path: Path) -> None:
    """80 line 27. The C library fills fresh memory with another byte in each process."""
    files = []
    for filling in ("1", "200"):
        files.append(tmp_path / f"{filling}.mp4")
        environment = {**os.environ, "MALLOC_PERTURB_": filling}
        subprocess.run([sys.executable, "-c", WRITE, str(files[-1])], env=environment, check=True)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_pictures_a_refined_portrait_and_another_output_size(
    generate: Callable[..., Lines], tmp_path: Path
) -> None:
    Image.effect_noise((50, 90), 60).save(tmp_path / "start.png")
    lines = generate("--image", str(tmp_path / "start.png"), "--resolution", "1080p", "--orientation", "portrait",
                     "--output-size", "40x60")
    facts = read_back(tmp_path / "clip.mp4")
    assert (facts.frames, facts.width, facts.height, facts.frame_rate) == (249, 40, 60, Fraction(25))
    assert facts.samples == 441_000
    assert {"encode_image", "refine"} <= lines[-1]["seconds"].keys()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The arguments of every engine call, by its name."""
    made: dict[str, dict[str, Any]] = {}
    run = LocalSession.run

    def noting(self: LocalSession, call: str, arguments: dict[str, Any], events: Any) -> Any:
        made[call] = arguments
        return run(self, call, arguments, events)

    monkeypatch.setattr(LocalSession, "run", noting)
    return made


def test_pictures_by_name_and_a_warning_for_one_that_the_prompt_does_not_mention(
    generate: Callable[..., Lines], calls: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name, grey in (("a", 10), ("b", 200)):
        Image.new("L", (64, 32), grey).save(tmp_path / f"{name}.png")
    named = json.dumps({"<Figure 2>": str(tmp_path / "b.png"), "<Figure 1>": str(tmp_path / "a.png")})
    (warning,) = generate("--image", named, "--steps", "1")[-1]["warnings"]
    assert "does not mention <Figure 2>" in warning
    assert calls["encode_text"]["figures"] == [1, 2]
    assert [int(picture[0, 0, 0]) for picture in calls["encode_image"]["pictures"]] == [10, 200]
    assert calls["sample"]["markers"][0].any()
    assert not calls["sample"]["markers"][1].any()


def test_an_over_long_prompt_is_cut_and_that_is_said_once(generate: Callable[..., Lines]) -> None:
    lines = generate("--steps", "1", prompt="boat " * 20_000)
    told = [line["text"] for line in lines if line["event"] == "log" and "tokens; only the first" in line["text"]]
    result = lines[-1]
    assert len(told) == 1
    assert result["truncated"] is True
    assert result["warnings"] == told
    assert f"only the first {result['prompt_tokens']} are used" in told[0]


def test_a_path_with_spaces_and_other_letters_in_the_home_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    name = "ein Schi\u00df f\u00fcr 5 \u20ac; $PATH.mp4"
    given = [str(tiny), "--prompt", "x", "--output", f"~/{name}", "--device", "cpu", "--resolution", "272p"]
    assert main(["generate", *given, "--steps", "1"]) == 0
    assert read_back(tmp_path / name).frames == 125
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / name}: 125 frames of 64x32 at 25/2 fps, 441000 samples at 44100 Hz, seed 42\n"
    assert "\r" not in printed.err, "a progress bar where there is no terminal"


@pytest.mark.parametrize(
    ("interrupt", "code", "sentence"),
    [
        (lambda: signal.raise_signal(signal.SIGINT), 130, "Interrupted; nothing was written."),
        (lambda: signal.raise_signal(signal.SIGTERM), 143, "Ended by SIGTERM; nothing was written."),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
@pytest.mark.parametrize("call", ["encode_text", "decode_audio", "write_clip"])
def test_a_signal_between_the_stages_ends_the_command(
    generate: Callable[..., Lines], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str,
    interrupt: Callable[[], None], code: int, sentence: str,
) -> None:  # fmt: skip
    run = LocalSession.run

    def interrupted(self: LocalSession, name: str, *arguments: Any) -> Any:
        if name == call:
            interrupt()
        return run(self, name, *arguments)

    monkeypatch.setattr(LocalSession, "run", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    lines = generate(code=code)
    assert lines[-1] == {"event": "error", "text": sentence}
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_fault_of_the_program_is_told_to_machines_too(
    generate: Callable[..., Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(LocalSession, "run", broken)
    assert generate(code=1)[-1] == {"event": "error", "text": "ZeroDivisionError: by zero"}


def test_the_demo_checks_its_clips_by_decoding_them(tmp_path: Path) -> None:
    frames, sound = torch.zeros(125, 256, 448, 3, dtype=torch.uint8), torch.zeros(2, 441_000)
    good = write_video(tmp_path / "good.mp4", [frames], Fraction(25, 2), Sound(sound))
    demo.check_clip(good)
    short = write_video(tmp_path / "short.mp4", [frames[:124]], Fraction(25, 2), Sound(sound))
    with pytest.raises(Magi2Error, match=r"short.mp4 holds .* \(124, 448, 256"):
        demo.check_clip(short)
    mute = write_video(tmp_path / "mute.mp4", [frames], Fraction(25, 2))
    with pytest.raises(Magi2Error, match="mute"):
        demo.check_clip(mute)
