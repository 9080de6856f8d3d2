"""What cannot work is refused in a sentence with exit code 1, before workers start and before any weight is read."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from magi2_native.headless import generate, session
from magi2_native.headless.arguments import name_pictures, read_prompt
from magi2_native.headless.cli import main
from magi2_native.magi2_core.codecs import media
from magi2_native.magi2_core.conditioning.negative import default_negative_prompt
from magi2_native.magi2_core.errors import RequestError
from PIL import Image

Refused = Callable[..., str]


@pytest.fixture
def refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Refused:
    """Runs `magi2 generate` with changed arguments; returns the sentence of its refusal."""

    def never(*_: object) -> Any:
        raise AssertionError("an engine call was made")

    def refuse(*extra: str, checkpoint: Path = tiny, prompt: str = "A boat", output: Path | None = None) -> str:
        for kind in (session.LocalSession, session.PoolSession):
            monkeypatch.setattr(kind, "run", never)
        output = output or tmp_path / "clip.mp4"
        started = time.monotonic()
        given = [str(checkpoint), "--prompt", prompt, "--output", str(output), "--device", "cpu"]
        assert main(["generate", *given, *extra]) == 1
        assert time.monotonic() - started < 10
        assert not output.is_file()
        printed = capsys.readouterr()
        assert not printed.out
        assert "Traceback" not in printed.err
        return printed.err

    return refuse


def test_an_empty_prompt(refused: Refused) -> None:
    for prompt in ("", "  \n\t"):
        assert "The prompt is empty" in refused(prompt=prompt)


def test_a_prompt_that_no_encoding_has(refused: Refused) -> None:
    assert "half of a surrogate pair (U+D83D) at position 2" in refused(prompt="a \ud83d boat")
    assert "negative prompt holds a NUL character at position 1" in refused("--negative-prompt", "a\0b")


def test_the_negative_prompt_is_the_given_one_the_users_file_or_the_packs(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def stop(request: Any, *_: Any) -> None:
        used.append(request.negative_prompt)
        raise RequestError("Far enough.")

    monkeypatch.setattr(generate, "generate", stop)
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "negative_prompt.txt").write_text("no rain, \u65e0\u96e8\n", encoding="utf-8")
    settings = ["--settings", str(tmp_path / "settings")]
    for extra in ([], settings, [*settings, "--negative-prompt", "no snow"], [*settings, "--negative-prompt", ""]):
        assert refused(*extra).endswith("Far enough.\n")
    assert used == [default_negative_prompt(), "no rain, \u65e0\u96e8", "no snow", ""]
    (tmp_path / "settings" / "negative_prompt.txt").write_bytes(b"\xff\xfe\xfa")
    assert "negative_prompt.txt cannot be read as UTF-8" in refused(*settings)


def test_a_prompt_that_is_given_twice_or_not_at_all(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("a boat")
    assert "not with both" in refused("--prompt-file", str(tmp_path / "prompt.txt"))
    with pytest.raises(RequestError, match="--prompt or with --prompt-file"):
        read_prompt(None, None)


def test_a_prompt_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    with pytest.raises(RequestError, match=r"prompt\.txt cannot be read"):
        read_prompt(None, file)
    file.write_bytes(b"\xff\xfe boat")
    with pytest.raises(RequestError, match=r"prompt\.txt cannot be read"):
        read_prompt(None, file)
    file.write_text("\n a b\u00f6at \n", encoding="utf-8")
    assert read_prompt(None, file) == "a b\u00f6at"
    file.write_text("{}", encoding="utf-8-sig")
    assert read_prompt(None, file) == "{}", "a byte order mark would keep it from being read as JSON"


def test_a_json_file_with_a_mistake_is_not_used_as_plain_text(tmp_path: Path) -> None:
    file = tmp_path / "caption.JSON"
    file.write_text('{"prompt": 5, "zzz')
    with pytest.raises(RequestError, match=r"caption\.JSON is no JSON: Unterminated string"):
        read_prompt(None, file)
    file.write_text('{"context": "a boat"}')
    assert read_prompt(None, file) == '{"context": "a boat"}'


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        (["--steps", "0"], "number of steps is 0; it must be a whole number, 1 to 1000"),
        (["--steps", "1000000000"], "number of steps is 1000000000; it must be"),
        (["--refiner-steps", "1001"], "number of steps is 1001; it must be"),
        (["--cfg-trick-start-frame", "9" * 401], "it must be a finite number"),
        (["--steps", "-3"], "number of steps is -3"),
        (["--refiner-steps", "0"], "number of steps is 0"),
        (["--shift", "nan"], "schedule shift is nan"),
        (["--shift", "1e9"], "put two noise levels on the same"),
        (["--video-txt-guidance-scale", "nan"], "video_txt_guidance_scale is nan; it must be a finite number"),
        (["--cfg-rescale", "inf"], "cfg_rescale is inf"),
        (["--seed", "-1"], "seed is -1; it must be a whole number from 0 to 18446744073709551615"),
        (["--seed", str(2**64)], "seed is 18446744073709551616"),
        (["--crf", "52"], "quality (CRF) is 52"),
        (["--output-size", "641x360"], "641x360 pixels; H.264 needs even sides"),
        (["--output-size", "0x0"], "0x0 pixels"),
        (["--output-size", "20000x20000"], "20000x20000 pixels; H.264 needs even sides of 2 to 8192"),
        (["--workers", "1000000"], "number of workers is 1000000; it must be 1 to 1024"),
        (["--image", '{"<Figure ' + "1" * 5000 + '>": "a"}'], "is no name of a picture"),
        (["--noise-device", "cuda"], "noise device is 'cuda', but the clip is made on the CPU"),
        (["--device", "cuda:77"], "'cuda:77' is not here; this process sees"),
        (["--device", "cpu,warp"], "'warp' is not here"),
        (["--workers", "0"], "number of workers is 0"),
        (["--device", "cpu,cpu", "--workers", "3"], "3 workers need as many devices, and there are 2"),
        (["--workers", "5"], "5 devices are asked for, but this model's heads divide over 1, 2, 3, 4 of them"),
        (["--workers", "5", "--layout", "sp5"], "sp5 does not divide the 24 attention heads. On 5 devices this model"),
        (["--layout", "tp2sp2"], "needs 4 devices and 1 is there"),
        (["--layout", "spam"], "'spam' is not a layout; write for example sp4"),
    ],
)
def test_a_setting_that_cannot_be_used(refused: Refused, extra: list[str], sentence: str) -> None:
    assert sentence in refused(*extra)


def test_an_empty_picture_argument_makes_a_clip_without_a_picture_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert name_pictures([""]) == {}
    assert caplog.messages == ["--image is empty, so this clip is made without a picture."]


def test_a_picture_that_cannot_be_used(refused: Refused, tmp_path: Path) -> None:
    text, long, torn = tmp_path / "notes.txt", tmp_path / "long.png", tmp_path / "torn.png"
    text.write_text("not a picture")
    Image.new("RGB", (1000, 10)).save(long)
    Image.effect_noise((64, 64), 9).save(torn)
    torn.write_bytes(torn.read_bytes()[:900])
    wide, tall = tmp_path / "wide.png", tmp_path / "tall.png"
    Image.new("L", (64, 32)).save(wide)
    Image.new("RGBA", (32, 64)).save(tall)
    assert "There is no picture at" in refused("--image", str(tmp_path / "none.png"))
    assert "is a folder, not a picture" in refused("--image", str(tmp_path))
    assert "not a picture in a format that can be read" in refused("--image", str(text))
    assert "cannot be read" in refused("--image", str(torn))
    assert "1000x10, too long and narrow" in refused("--image", str(long))
    assert "different sizes" in refused("--image", str(wide), "--image", str(tall))
    named = json.dumps({"<Figure 7>": str(tall), "<Figure 4>": str(wide)})
    assert "different sizes (<Figure 4> 896x448, <Figure 7> 448x896)" in refused("--image", named)
    assert "17 pictures arrived; at most 16 can be used" in refused(*["--image", str(wide)] * 17)


@pytest.mark.parametrize(
    ("arguments", "pictures"),
    [
        ([], {}),
        ([" "], {}),
        (["a.png"], {1: "a.png"}),
        (["b.png", "a.png", "./{c}"], {1: "b.png", 2: "a.png", 3: "{c}"}),
        ([' {"<Figure 2>": "b.png", "<Figure 1>": "a.png"}'], {1: "a.png", 2: "b.png"}),
        (["{}"], {}),
    ],
)
def test_pictures_are_numbered_or_named(arguments: list[str], pictures: dict[int, str]) -> None:
    assert list(name_pictures(arguments).items()) == [(figure, Path(name)) for figure, name in pictures.items()]


@pytest.mark.parametrize("as_map", [True, False], ids=["a map", "one after the other"])
def test_ten_pictures_come_in_the_references_order_or_by_number(as_map: bool) -> None:
    paths = [f"{figure}.png" for figure in range(1, 12)]
    arguments = [json.dumps({f"<Figure {i}>": path for i, path in enumerate(paths, 1)})] if as_map else paths
    assert list(name_pictures(arguments)) == [10, 11, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(name_pictures(arguments, numeric=True)) == list(range(1, 12))
    assert all(path == Path(f"{figure}.png") for figure, path in name_pictures(arguments).items())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (['{"<Figure 1>": "a.png"'], "not valid JSON"),
        (['{"first": "a.png", "second": "b.png"}'], "Two pictures are <Figure 1>; name them <Figure 1>, <Figure 2>"),
        (["a.png", '{"<Figure 2>": "b.png"}'], "give it as the only --image"),
    ],
)
def test_pictures_without_clear_numbers(arguments: list[str], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        name_pictures(arguments)


def test_an_output_that_cannot_be_written(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "gone does not exist" in refused(output=tmp_path / "gone" / "clip.mp4")
    assert "must be a name that ends in .mp4" in refused(output=tmp_path / "clip.avi")
    (tmp_path / "folder.mp4").mkdir()
    assert "exists and is not a file" in refused(output=tmp_path / "folder.mp4")

    class Unwritable(Path):
        _flavour = type(tmp_path)._flavour  # type: ignore[attr-defined]

        def touch(self, *_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied")

    # the superuser may write everywhere, so that a folder without rights would prove nothing
    monkeypatch.setattr(media, "_temporary_name", lambda target: Unwritable(target.parent / "probe"))
    assert "cannot be written: [Errno 13]" in refused()


def test_a_checkpoint_that_is_not_there_or_is_not_one(refused: Refused, tmp_path: Path) -> None:
    assert "gone does not exist" in refused(checkpoint=tmp_path / "gone")
    (tmp_path / "magi2_preview.json").write_text("{")
    assert "magi2_preview.json" in refused(checkpoint=tmp_path)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint of the test's own."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.mark.parametrize("folder", ["preview", "text_encoder", "stable-audio-open-1.0"])
def test_a_shard_cut_by_one_byte(refused: Refused, copy: Path, folder: str) -> None:
    shard = max((copy / folder).glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    sentence = refused(checkpoint=copy)
    assert f"{folder}/{shard.name}" in sentence
    assert "expected" in sentence


@pytest.mark.parametrize(
    ("folder", "extra"),
    [("preview", []), ("turbo_vae", []), ("vae", ["--image", "picture.png"]), ("refiner", ["--resolution", "1080p"])],
)
def test_a_part_that_this_request_takes_is_missing(
    refused: Refused, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, extra: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64)).save("picture.png")
    shutil.rmtree(copy / folder)
    sentence = refused(*extra, checkpoint=copy)
    assert f"{copy / folder}" in sentence
    assert "found no such" in sentence


def test_a_machine_that_is_too_small(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    from magi2_native.magi2_core.memory import plan

    monkeypatch.setattr(plan, "device_memory", lambda device: 1_000_000_000)
    sentence = refused()
    assert "on cpu and 1.0 GB are there" in sentence
    assert "--start-anyway" in sentence


def test_a_refusal_for_machines_is_one_json_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tiny), "--prompt", " ", "--output", str(tmp_path / "clip.mp4"), "--device", "cpu", "--json"]
    assert main(["generate", *given]) == 1
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    text = "The prompt is empty; describe what the clip should show and sound like."
    assert lines[-1] == {"event": "error", "text": text}
    assert [line["event"] for line in lines].count("error") == 1
    assert not printed.err
