"""Structured captions: schemas, both renderings, the form, and the examples (30 §6, 8, 9)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from magi2_native.magi2_core.conditioning.captions import CAPTIONS, Task, caption_problems, response_schema
from magi2_native.magi2_core.conditioning.compact import normalise
from magi2_native.magi2_core.conditioning.compose import CaptionForm, caption_prompt, compose_caption
from magi2_native.magi2_core.conditioning.enhance import INSTRUCTION_FILES, instruction
from magi2_native.magi2_core.conditioning.markdown import render_markdown
from magi2_native.magi2_core.conditioning.negative import default_negative_prompt
from magi2_native.magi2_core.conditioning.prompt import prepare_prompt
from magi2_native.magi2_core.conditioning.tokenizer import PromptTokenizer
from magi2_native.magi2_core.errors import RequestError

TOKENIZER = Path(__file__).parent / "golden" / "cases" / "text" / "tiny_qwen35"
EXAMPLES = sorted((Path(__file__).parents[1] / "workflows" / "captions").glob("*.json"))


def read(file: Path) -> dict[str, Any]:
    caption: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return caption


def task_of(caption: dict[str, Any]) -> Task:
    return "t2v" if "global_layer" in caption else "i2v"


def of_task(task: Task) -> list[Path]:
    return [file for file in EXAMPLES if task_of(read(file)) == task]


def values(caption: Any, key: str) -> Iterator[Any]:
    """Every value that stands under a key, at any depth."""
    if isinstance(caption, dict):
        for name, value in caption.items():
            if name == key:
                yield value
            yield from values(value, key)
    elif isinstance(caption, list):
        for item in caption:
            yield from values(item, key)


def seconds(clock: str) -> float:
    minutes, rest = clock.split(":")
    return 60 * int(minutes) + float(rest)


def interval(text: str) -> tuple[float, float]:
    """A time or a range in the captions' spelling."""
    assert re.fullmatch(r"\d\d:\d\d\.\d(-\d\d:\d\d\.\d)?", text), text
    start, _, end = text.partition("-")
    return seconds(start), seconds(end or start)


# --- schemas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_schema_needs_no_references(task: Task) -> None:
    assert "$ref" not in json.dumps(response_schema(task))


def test_fields_that_may_be_left_out_are_still_required_of_endpoints() -> None:
    caption = read(of_task("t2v")[0])
    del caption["global_layer"]["aesthetics"]["visual_effects"]
    assert caption_problems("t2v", caption) == []
    aesthetics = response_schema("t2v")["properties"]["global_layer"]["properties"]["aesthetics"]
    assert "visual_effects" in aesthetics["required"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: c["global_layer"].pop("context"), "global_layer.context: Field required"),
        (lambda c: c.update(extra=1), "extra: Extra inputs are not permitted"),
        (lambda c: c["global_layer"]["video_metadata"].update(duration="10"), "global_layer.video_metadata.duration"),
        (lambda c: c["dynamic_layer"].update(timeline_segments={}), "dynamic_layer.timeline_segments"),
    ],
)
def test_faults_are_named_by_their_path(change: Any, problem: str) -> None:
    caption = read(of_task("t2v")[0])
    change(caption)
    (found,) = caption_problems("t2v", caption)
    assert found.startswith(problem)


def test_whole_numbers_are_numbers() -> None:
    caption = read(of_task("i2v")[0])
    caption["shot_timeline"][0]["time_range_seconds"] = [0, 10]
    assert caption_problems("i2v", caption) == []


@pytest.mark.parametrize("caption", [None, [], "x", 3])
def test_anything_but_an_object_is_a_fault(caption: Any) -> None:
    assert caption_problems("t2v", caption)


# --- examples --------------------------------------------------------------------------------------------------------


def test_there_are_six_examples_for_text_and_pictures() -> None:
    assert len(of_task("t2v")) == 4
    assert len(of_task("i2v")) == 2


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_fits_its_schema(file: Path) -> None:
    caption = read(file)
    assert caption_problems(task_of(caption), caption) == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_fits_into_the_token_limit(file: Path) -> None:
    tokenizer = PromptTokenizer(TOKENIZER)  # its small vocabulary needs more tokens than the real one
    for form in ("compact", "markdown"):
        assert not prepare_prompt(caption_prompt(read(file), form), tokenizer).tokens.truncated  # type: ignore[arg-type]


@pytest.mark.parametrize("file", of_task("t2v"), ids=lambda file: file.stem)
def test_the_segments_of_an_example_cover_ten_seconds_and_hold_their_times(file: Path) -> None:
    segments = read(file)["dynamic_layer"]["timeline_segments"]
    times = [interval(segment["segment_basic_info"]["timestamp_range"]) for segment in segments]
    assert times[0][0] == 0
    assert times[-1][1] == 10
    assert all(a[1] == b[0] for a, b in pairwise(times))
    for segment, (start, end) in zip(segments, times, strict=True):
        inner = [*values(segment, "timestamp"), *values(segment, "timestamp_range")]
        assert all(start <= a <= b <= end for a, b in map(interval, inner))


@pytest.mark.parametrize("file", of_task("t2v"), ids=lambda file: file.stem)
def test_every_identifier_of_an_example_is_defined_and_numbered(file: Path) -> None:
    caption = read(file)
    whole = caption["global_layer"]
    subjects = [subject["subject_id"] for subject in whole["alive_subjects_static"]]
    objects = [thing["object_id"] for thing in whole["objects_static"]]
    assert subjects == [f"<subject {i + 1}>" for i in range(len(subjects))]
    assert objects == [f"<object {i + 1}>" for i in range(len(objects))]
    used = set(re.findall(r"<(?:subject|object) \d+>", json.dumps(caption, ensure_ascii=False)))
    assert used == {*subjects, *objects}
    events = list(values(caption, "event_id"))
    assert events == [f"event {i + 1}" for i in range(len(events))]
    assert {*values(caption, "speaker")} == {*whole["audio_baseline"]["dialogue"]["speaker_tags"]}


@pytest.mark.parametrize("file", of_task("i2v"), ids=lambda file: file.stem)
def test_every_reference_of_an_example_is_defined(file: Path) -> None:
    caption = read(file)
    references = {item["reference_identifier"] for item in caption["reference_bank"]}
    sounds = {item["audio_event_identifier"] for item in caption["audio_event_timeline"]}
    shots = caption["shot_timeline"]
    used = {*values(caption, "source_reference_identifier"), *values(caption, "scene_reference_identifier")}
    assert used | {name for shot in shots for name in shot["reference_identifiers"]} == references
    assert {name for shot in shots for name in shot["audio_event_identifiers"]} == sounds
    assert all(0 <= start < end <= 10 for start, end in values(caption, "time_range_seconds"))


def test_the_examples_speak_several_languages_two_of_them_in_one_clip() -> None:
    spoken = {file.stem: [*values(read(file), "spoken_text"), *values(read(file), "text")] for file in EXAMPLES}
    assert any("はい" in line for line in spoken["text_two_languages"])
    assert any("Excusez" in line for line in spoken["text_two_languages"])
    assert any("慢慢吃" in line for line in spoken["text_night_market"])
    assert any("Buenas" in line for line in spoken["picture_host_greets"])


@pytest.mark.parametrize("file", of_task("t2v"), ids=lambda file: file.stem)
def test_the_compact_form_of_an_example_keeps_its_dialogue_and_segments(file: Path) -> None:
    caption = read(file)
    seen = normalise(caption_prompt(caption, "compact"))
    assert seen.startswith("context: ")
    for key in ("segment_description", "timestamp_range"):
        assert all(value in seen for value in [segment["segment_basic_info"][key] for segment in
                                               caption["dynamic_layer"]["timeline_segments"]])  # fmt: skip
    for line in (line for lines in values(caption, "dialogue_lines") for line in lines):
        assert f"   - dialogue {line['speaker']}: {line['text']} ({line['timestamp']})" in seen


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_two_forms_of_an_example_are_not_mixed_up(file: Path) -> None:
    caption = read(file)
    markdown = caption_prompt(caption, "markdown")
    assert markdown.startswith("# global_")
    assert normalise(markdown) == markdown == render_markdown(caption)
    compact = normalise(caption_prompt(caption, "compact"))
    assert ("# global" in compact) is False
    assert compact.startswith("{") == (task_of(caption) == "i2v")  # 30 §1: no global_layer, so it stays JSON


# --- the form --------------------------------------------------------------------------------------------------------


FORM = CaptionForm(
    context="Pier",
    description="Two boats pass.",
    subjects="an old fisherman | yellow oilskin | left\na boy",
    objects="a red boat | long, red | centre",
    timeline="0-4 The boats come near.\n00:04.0-00:10.0: They pass.",
    dialogue="1-3 <subject 1>: Ahoy! | loud\nsubject 2: ¿Qué tal?\n5-6.5 Narrator: And gone.",
    language="English and Spanish",
    ambience="gulls",
    style="ink",
    mood="calm",
    colors="teal",
)


def test_a_filled_form_becomes_the_text_that_the_encoder_sees() -> None:
    caption = compose_caption(FORM)
    assert caption_problems("t2v", caption) == []
    assert normalise(caption_prompt(caption, "compact")).splitlines() == [
        "context: Pier",
        "Two boats pass.",
        "aesthetics: style=ink; mood=calm; color=teal",
        "audio: language=English and Spanish; speakers=<subject 1>,<subject 2>,Narrator; ambience=gulls",
        "subjects:",
        " - <subject 1> | an old fisherman (left) :: clothing=yellow oilskin",
        " - <subject 2> | a boy",
        "objects:",
        " - <object 1> | a red boat :: long, red; centre",
        "timeline:",
        " - 00:00.0-00:04.0 The boats come near.",
        "   - dialogue <subject 1>: Ahoy! (00:01.0-00:03.0)",
        "   - dialogue <subject 2>: ¿Qué tal?",
        " - 00:04.0-00:10.0 They pass.",
        "   - dialogue Narrator: And gone. (00:05.0-00:06.5)",
    ]


def test_a_timeline_without_times_is_divided_evenly() -> None:
    caption = compose_caption(CaptionForm(timeline="one\n\ntwo\nthree"))
    times = list(values(caption, "timestamp_range"))
    assert times == ["00:00.0-00:03.3", "00:03.3-00:06.7", "00:06.7-00:10.0"]


def test_dialogue_without_a_timeline_gets_one_segment() -> None:
    caption = compose_caption(CaptionForm(dialogue="Narrator：你好: x"))
    (line,) = next(values(caption, "dialogue_lines"))
    assert (line["speaker"], line["text"]) == ("Narrator", "你好: x")
    assert list(values(caption, "timestamp_range")) == ["00:00.0-00:10.0"]


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (CaptionForm(style="ink"), "The caption is empty"),
        (CaptionForm(timeline="0-5 a\nb"), "'b' has no time while others have one"),
        (CaptionForm(timeline="0-5 a\n4-10 b"), r"starts before the line above it ends \(00:05.0\)"),
        (CaptionForm(timeline="5-12 a"), "must lie between 0 and 10 seconds"),
        (CaptionForm(timeline="5-5 a"), "go forward"),
        (CaptionForm(dialogue="hello"), "names no speaker"),
        (CaptionForm(dialogue="<subject 2>: hello", subjects="a man"), "but the caption has 1 subject\\."),
    ],
)
def test_lines_that_cannot_be_understood_get_a_sentence(form: CaptionForm, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        compose_caption(form)


# --- texts -----------------------------------------------------------------------------------------------------------


def test_the_negative_prompt_has_the_three_groups_as_terms() -> None:
    terms = default_negative_prompt().split(", ")
    assert len(terms) == len(set(terms)) >= 90
    for term in ("blurry", "background music", "hiss", "robotic voice", "subtitles", "several voices at once"):
        assert any(term in other for other in terms)
    assert default_negative_prompt().isascii()


def test_users_can_replace_the_negative_prompt(tmp_path: Path) -> None:
    (tmp_path / "negative_prompt.txt").write_text("\ufeffmine\n", encoding="utf-8")
    assert default_negative_prompt(tmp_path) == "mine"
    assert default_negative_prompt(tmp_path / "none") == default_negative_prompt()


def test_a_text_that_is_not_utf8_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "negative_prompt.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(RequestError, match="cannot be read as UTF-8"):
        default_negative_prompt(tmp_path)


@pytest.mark.parametrize("task", list(INSTRUCTION_FILES))
def test_an_instruction_shows_every_field_of_its_caption(task: Task) -> None:
    text = instruction(task)
    block = re.search(r"```\n(.*?)```", text, re.DOTALL)
    assert block is not None
    shape = json.loads(block[1])
    assert caption_problems(task, shape) == []
    assert list(shape) == list(CAPTIONS[task].model_fields)
    assert text.count("{user_prompt}") == text.count("{variation_seed}") == 1
