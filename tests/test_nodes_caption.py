"""Magi2Caption: fields to a caption, a caption changed by fields, and what the encoder will see (30 §6, §8, §9)."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from magi2_native.magi2_core.checkpoint.miniature_text import write_tokenizer
from magi2_native.magi2_core.conditioning.compact import normalise
from magi2_native.magi2_core.conditioning.markdown import render_markdown
from magi2_native.magi2_core.conditioning.tokenizer import PromptTokenizer
from magi2_native.tests.comfy_stub import execute
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in

CAPTIONS = Path(__file__).resolve().parent.parent / "workflows" / "captions"
FIELDS = {
    "context": "A potter at work",
    "subjects": "a potter | apron | centre\nher cat",
    "timeline": "0-4 she centres the clay\n4-10 the bowl opens",
    "dialogue": "5-6.5 subject 1: Slowly now. | softly\n<subject 2>: Miaow.",
    "language": "English",
    "ambience": "the wheel hums",
}


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path) as graph:
        yield graph


def example(name: str) -> Any:
    return json.loads((CAPTIONS / f"{name}.json").read_text(encoding="utf-8"))


def caption(graph: Graph, **inputs: Any) -> Any:
    """The caption that the node gives out as JSON."""
    return json.loads(graph.run("Magi2Caption", **inputs)[1])


def shown(graph: Graph, **inputs: Any) -> str:
    """The text in the node, which must be the one that is sent to the page too."""
    (text,) = execute(graph.nodes["Magi2Caption"], node_id="5", **inputs).ui["text"]
    assert graph.stub.server.texts[-1] == ("5", text)
    return text


def test_fields_become_a_caption_of_all_parts(graph: Graph) -> None:
    made = caption(graph, **FIELDS)
    whole, segments = made["global_layer"], made["dynamic_layer"]["timeline_segments"]
    assert whole["context"] == "A potter at work"
    assert [each["subject_id"] for each in whole["alive_subjects_static"]] == ["<subject 1>", "<subject 2>"]
    assert whole["alive_subjects_static"][0]["visual_attributes"]["clothing"] == "apron"
    assert whole["audio_baseline"]["dialogue"] == {
        "language": "English", "speaker_tags": ["<subject 1>", "<subject 2>"]
    }  # fmt: skip
    assert whole["video_metadata"] == {"duration": 10.0, "aspect_ratio": "16:9"}
    assert [each["segment_basic_info"]["timestamp_range"] for each in segments] == [
        "00:00.0-00:04.0", "00:04.0-00:10.0"
    ]  # fmt: skip
    assert [[line["text"] for line in each["audio"]["dialogue_lines"]] for each in segments] == [
        ["Miaow."], ["Slowly now."]
    ]  # fmt: skip


def test_a_newer_page_folds_the_details_away(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    module = graph.stub.module("nodes.caption")
    folded = []

    def newer_input(name: str, *, advanced: bool = False, **options: Any) -> Any:
        folded.append((name, advanced))
        return module.io.String.Input(name, **options)

    monkeypatch.setattr(module, "FOLDED", partial(module.advanced, newer_input))
    module.Magi2Caption.define_schema()
    names = ("mood", "colors", "camera", "light", "setting", "objects", "aspect_ratio")
    assert folded == [(name, True) for name in names]


def test_the_two_forms_are_what_enhancement_gives_and_what_typed_json_gives(graph: Graph) -> None:
    made = caption(graph, **FIELDS)
    markdown, _ = graph.run("Magi2Caption", **FIELDS)
    assert markdown == render_markdown(made)
    assert shown(graph, **FIELDS).endswith(f"The encoder sees:\n\n{markdown}")
    compact, _ = graph.run("Magi2Caption", **FIELDS, form="compact")
    assert json.loads(compact) == made
    text = shown(graph, **FIELDS, form="compact").split("The encoder sees:\n\n")[1]
    assert text == normalise(compact)
    assert text.splitlines() == [
        "context: A potter at work",
        "audio: language=English; speakers=<subject 1>,<subject 2>; ambience=the wheel hums",
        "subjects:",
        " - <subject 1> | a potter (centre) :: clothing=apron",
        " - <subject 2> | her cat",
        "timeline:",
        " - 00:00.0-00:04.0 she centres the clay",
        "   - dialogue <subject 2>: Miaow.",
        " - 00:04.0-00:10.0 the bowl opens",
        "   - dialogue <subject 1>: Slowly now. (00:05.0-00:06.5)",
    ]


def test_what_is_shown_for_a_picture_ends_with_the_sentence_that_the_encoder_adds(graph: Graph) -> None:
    plain, tied = shown(graph, **FIELDS), shown(graph, **FIELDS, for_picture=True)
    assert tied == f"{plain}reference_layer:The first frame refers to <Figure 1>"
    prompts = {graph.run("Magi2Caption", **FIELDS, for_picture=tied)[0] for tied in (True, False)}
    assert len(prompts) == 1, "the prompt itself is the same: Magi2EncodePrompt adds the sentence"


@pytest.mark.parametrize("text", ["a quiet potter", "一位陶艺家", "ろくろ", "도자기", "خزافة", "🏺🎬"])
def test_tokens_are_counted_with_the_tokenizer_of_the_model(graph: Graph, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "models" / "magi2" / "mini" / "text_encoder"
    write_tokenizer(folder, 64)
    line, _, seen = shown(graph, context=text, model=graph.model()).partition("\nThe encoder sees:\n\n")
    assert text in seen
    assert line == f"{len(PromptTokenizer(folder)(seen).ids)} of at most 7000 tokens."
    shutil.rmtree(folder)


def test_a_tokenizer_that_was_replaced_counts_at_once(graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "magi2" / "mini" / "text_encoder"
    counts = []
    for merges in (0, 64):
        write_tokenizer(folder, merges)
        counts.append(shown(graph, context="the camera follows", model=graph.model()).partition("\n")[0])
    assert counts[0] != counts[1]


def test_a_caption_that_is_cut_off_says_so(graph: Graph, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "magi2" / "mini" / "text_encoder"
    write_tokenizer(folder, 64)
    text = shown(graph, edited_caption="0123456789" * 701, model=graph.model())
    assert text.startswith("7010 of at most 7000 tokens.\nThe prompt has 7010 tokens; only the first 7000 are used")


@pytest.mark.parametrize(
    ("timeline", "covered"), [("2-3 birds land on it", "2 to 3 of the 10"), ("0-4 a\n4-9.5 b", "0 to 9.5 of the 10")]
)
def test_a_timeline_that_leaves_a_part_of_the_clip_out_is_noticed(graph: Graph, timeline: str, covered: str) -> None:
    assert f"The timeline covers {covered} seconds. Numbers at the start of a line" in shown(graph, timeline=timeline)
    assert "The timeline covers" not in shown(graph, timeline=timeline, edited_caption="my own words")


@pytest.mark.parametrize("timeline", ["0-10 a", "a\nb\nc", ""])
def test_a_timeline_that_covers_the_clip_needs_no_word(graph: Graph, timeline: str) -> None:
    assert "The timeline covers" not in shown(graph, context="x", timeline=timeline)


def test_without_a_tokenizer_the_node_says_why_there_is_no_count(graph: Graph, tmp_path: Path) -> None:
    assert shown(graph, **FIELDS).startswith("Connect model to have the tokens counted.\n")
    model = graph.model()
    shutil.rmtree(tmp_path / "models" / "magi2" / "mini" / "text_encoder")
    assert "could not be counted. The text encoder folder" in shown(graph, **FIELDS, model=model)
    assert graph.pools == [], "counting starts no workers"


# ---- a caption to start from


@pytest.mark.parametrize("name", sorted(path.stem for path in CAPTIONS.glob("*.json")))
def test_a_caption_to_start_from_comes_out_as_it_was(graph: Graph, name: str) -> None:
    start = example(name)
    prompt, text = graph.run("Magi2Caption", caption=json.dumps(start))
    assert json.loads(text) == start
    assert prompt == render_markdown(start)
    assert "Not as in" not in shown(graph, caption=json.dumps(start))


def test_fields_are_laid_over_the_caption_and_the_rest_of_it_stays(graph: Graph) -> None:
    start = example("text_two_languages")
    made = caption(graph, caption=json.dumps(start), ambience="heavy rain", style="ink drawing", aspect_ratio="9:16")
    start["global_layer"]["audio_baseline"]["ambience"] = "heavy rain"
    start["global_layer"]["aesthetics"]["style"] = "ink drawing"
    start["global_layer"]["video_metadata"]["aspect_ratio"] = "9:16"
    assert made == start


def lines(made: Any) -> list[list[str]]:
    segments = made["dynamic_layer"]["timeline_segments"]
    return [[line["text"] for line in segment["audio"]["dialogue_lines"]] for segment in segments]


def test_new_dialogue_goes_to_the_segments_of_the_caption_in_which_it_starts(graph: Graph) -> None:
    start = example("text_two_languages")
    begins = [each["segment_basic_info"]["timestamp_range"] for each in start["dynamic_layer"]["timeline_segments"]]
    assert len(begins) > 1
    assert sum(map(len, lines(start))) > 0
    made = caption(graph, caption=json.dumps(start), dialogue="0-1 <subject 2>: first\n9-10 <subject 2>: last")
    assert lines(made) == [["first"], *[[]] * (len(begins) - 2), ["last"]]
    assert made["global_layer"]["audio_baseline"]["dialogue"]["speaker_tags"] == ["<subject 2>"]
    actions = [segment["alive_subjects"] for segment in start["dynamic_layer"]["timeline_segments"]]
    assert [segment["alive_subjects"] for segment in made["dynamic_layer"]["timeline_segments"]] == actions
    with pytest.raises(ValueError, match="spoken by <subject 7>, but the caption has 2 subjects"):
        caption(graph, caption=json.dumps(start), dialogue="<subject 7>: who?")


def test_a_new_timeline_keeps_what_the_caption_says(graph: Graph) -> None:
    start = example("text_two_languages")
    said = [text for segment in lines(start) for text in segment]
    made = caption(graph, caption=json.dumps(start), timeline="0-1 nothing moves\n1-10 everything moves")
    assert [text for segment in lines(made) for text in segment] == said
    assert lines(made)[1] == said, "nobody speaks in the first second"


@pytest.mark.parametrize("start", ['{"global_layer": {}}', '{"global_layer": null, "dynamic_layer": {}}'])
def test_a_caption_with_hardly_anything_in_it_takes_fields_too(graph: Graph, start: str) -> None:
    made = caption(graph, caption=start, ambience="wind", dialogue="a crow: Kraa!", timeline="a\nb")
    assert made["global_layer"]["audio_baseline"]["ambience"] == "wind"
    assert lines(made) == [["Kraa!"], []]


def test_an_edited_caption_takes_the_place_of_the_linked_one_and_of_the_fields(graph: Graph) -> None:
    edited = {"global_layer": {"context": "mine"}}
    linked = json.dumps(example("text_potter"))
    assert caption(graph, **FIELDS, caption=linked, edited_caption=json.dumps(edited)) == edited


def test_plain_text_and_markdown_are_used_as_they_are(graph: Graph) -> None:
    text = "  # my own\n(word:1.2) {a|b} // <lora:x> \\n\n"
    assert graph.run("Magi2Caption", edited_caption=text) == (text, text)
    made = caption(graph, caption="a boat at sea", ambience="gulls")
    assert made["global_layer"]["description"] == "a boat at sea"
    assert made["global_layer"]["audio_baseline"]["ambience"] == "gulls"


def test_unknown_and_missing_parts_are_named_but_used(graph: Graph) -> None:
    start = {"global_layer": {"context": "x", "smell": "y"}, "reference_layer": ["The first frame is <Figure 1>"]}
    text = shown(graph, caption=json.dumps(start))
    assert "Not as in the captions that the model knows: global_layer.description: Field required" in text
    assert "and 8 more" in text
    assert "reference_layer:" in text
    assert "it has none of its top-level fields" in shown(graph, caption='{"scene": "x"}')


def test_the_caption_of_a_picture_has_neither_fields_nor_a_compact_form(graph: Graph) -> None:
    start = json.dumps(example("picture_lighthouse"))
    with pytest.raises(ValueError, match="belong to a text-to-video caption"):
        caption(graph, caption=start, ambience="wind")
    with pytest.raises(ValueError, match="choose markdown"):
        caption(graph, caption=start, form="compact")


# ---- stopping to edit


def test_the_run_stops_until_the_caption_has_been_edited(graph: Graph) -> None:
    start = json.dumps(example("text_potter"))
    result = execute(graph.nodes["Magi2Caption"], caption=start, stop_to_edit=True)
    assert result.args == (None, None), "nothing that a later node could use"
    (text,), (edit,) = result.ui["text"], result.ui["caption"]
    assert "copy this caption into edited_caption" in text
    assert text.endswith(edit), "what is shown can be pasted as it is"
    assert json.loads(edit) == example("text_potter")
    prompt, _ = graph.run("Magi2Caption", caption=start, stop_to_edit=True, edited_caption="my own words")
    assert prompt == "my own words"


# ---- what cannot be understood


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "caption is empty"),
        ({"timeline": "0-4 a\n3-6 b"}, "starts before the line above it ends"),
        ({"timeline": "0-11 a"}, "between 0 and 10 seconds"),
        ({"context": "x", "dialogue": "no speaker here"}, "names no speaker"),
        ({"edited_caption": '{"global_layer": {"context": "x",}}'}, "starts like JSON, but it is none: .*line 1"),
        ({"caption": '{"global_layer": {"aesthetics": []}}', "style": "x"}, "aesthetics of the caption is not"),
        ({"edited_caption": '{"global_layer": {"context": ""}}'}, "All fields of the caption are empty"),
        ({"edited_caption": '{"global_layer": {"light": "x"}}', "form": "compact"}, "empty in its compact form"),
        ({"context": "nul \0"}, "The context holds a NUL"),
        ({"edited_caption": "half \ud800"}, "half of a surrogate pair"),
        ({"edited_caption": '{"global_layer": {"context": "\\ud800"}}'}, "reading it as JSON, holds half of"),
        ({"caption": '{"global_layer": {"light": "\\u0000"}}', "form": "compact"}, "as JSON, holds a NUL"),
        ({"edited_caption": f'{{"global_layer": {"[" * 800}{"]" * 800}}}'}, "nested too deeply"),
        ({"edited_caption": '{"a":' * 100_000}, "nested too deeply"),
        ({"context": "x", "form": "yaml"}, "form is 'yaml'; it must be one of markdown, compact"),
    ],
)
def test_what_cannot_be_understood_gets_a_sentence(graph: Graph, inputs: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph.run("Magi2Caption", **inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        {"timeline": "0-4 a\n3-6 b"},
        {"dialogue": "no speaker here"},
        {"edited_caption": "{broken"},
        {"subjects": "\ud800"},
        {"form": "yaml"},
    ],
)
def test_mistakes_in_lines_are_found_before_anything_runs(graph: Graph, inputs: dict[str, str]) -> None:
    check = graph.nodes["Magi2Caption"].validate_inputs
    assert isinstance(check(**inputs), str)
    # subject 9 may come over a link
    assert check(timeline="0-4 a", dialogue="<subject 9>: hi", edited_caption="{}") is True
    assert check(dialogue="no speaker here", edited_caption=None) is True, "a linked one takes the fields' place"
    assert check() is True


def test_the_caption_is_what_the_encoder_gets(graph: Graph) -> None:
    prompt, _ = graph.run("Magi2Caption", **FIELDS)
    graph.conditioning(prompt)
    assert graph.pools[0].calls[-1][1]["prompt"] == prompt
