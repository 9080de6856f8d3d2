"""The shipped workflows as files: links, slots, values, and nothing of the person who saved them (60 §9)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"
TEMPLATES = sorted(WORKFLOWS.glob("*.json"))
CORE = {"SaveVideo", "LoadImage", "MarkdownNote"}
PLACEHOLDER = "MAGI-2-Preview"


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Graph]:
    with graph_in(tmp_path_factory.mktemp("comfy")) as graph:
        yield graph


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def workflow(template: Path) -> dict[str, Any]:
    return json.loads(template.read_text(encoding="utf-8"))


@pytest.fixture
def twin(template: Path) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / template.name).read_text(encoding="utf-8"))


def test_the_three_templates_are_there_and_every_one_has_its_twin_and_picture() -> None:
    assert {"text_to_clip", "picture_to_clip", "low_memory"} <= {path.stem for path in TEMPLATES}
    assert {path.name for path in (WORKFLOWS / "api").glob("*.json")} == {path.name for path in TEMPLATES}
    for path in TEMPLATES:
        assert path.with_suffix(".jpg").stat().st_size < 100_000


def test_ids_are_unique_and_the_three_copies_of_every_link_agree(workflow: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in workflow["nodes"]}
    links = {link[0]: link for link in workflow["links"]}
    assert len(nodes) == len(workflow["nodes"])
    assert len(links) == len(workflow["links"])
    for number, origin, out_slot, target, in_slot, kind in workflow["links"]:
        assert number in nodes[origin]["outputs"][out_slot]["links"]
        assert nodes[target]["inputs"][in_slot]["link"] == number
        assert kind == "*" or nodes[origin]["outputs"][out_slot]["type"] == kind
    outgoing = {number for node in nodes.values() for slot in node.get("outputs", []) for number in slot["links"] or []}
    incoming = {slot["link"] for node in nodes.values() for slot in node.get("inputs", []) if slot.get("link")}
    assert outgoing == incoming == set(links)
    assert workflow["last_node_id"] >= max(nodes)
    assert workflow["last_link_id"] >= max(links)


def test_nodes_are_known_and_their_widgets_have_values_in_order(
    graph: Graph, workflow: dict[str, Any], twin: dict[str, Any]
) -> None:
    for node in workflow["nodes"]:
        if node["type"] in CORE:
            continue
        slots = graph.nodes[node["type"]].GET_SCHEMA().inputs
        kinds = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
        widgets = [slot for slot in slots if slot.io_type in kinds and not slot.extra.get("forceInput")]
        values = list(node.get("widgets_values", []))
        for widget in widgets:
            value = values.pop(0)
            if widget.extra.get("control_after_generate"):
                assert values.pop(0) == "fixed"
            sent = twin[str(node["id"])]["inputs"][widget.id]
            assert sent == value or isinstance(sent, list), "the twin sends the widget's value, or a link"
            if widget.io_type == "COMBO" and widget.id != "checkpoint":
                assert value in widget.extra["options"]
        assert values == []


def test_the_twin_has_the_same_nodes_and_only_known_inputs(graph: Graph, workflow: Any, twin: dict[str, Any]) -> None:
    shown = {str(node["id"]): node["type"] for node in workflow["nodes"] if node["type"] != "MarkdownNote"}
    assert {node_id: node["class_type"] for node_id, node in twin.items()} == shown
    for node in twin.values():
        if node["class_type"] not in CORE:
            known = {slot.id for slot in graph.nodes[node["class_type"]].GET_SCHEMA().inputs}
            assert set(node["inputs"]) <= known
    loaders = [node for node in twin.values() if node["class_type"] == "Magi2LoadCheckpoint"]
    assert {node["inputs"]["checkpoint"] for node in loaders} == {PLACEHOLDER}


def test_a_note_says_which_files_go_where(workflow: dict[str, Any]) -> None:
    (note,) = (node for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    assert f"models/magi2/{PLACEHOLDER}" in note["widgets_values"][0]


def test_nothing_belongs_to_the_person_who_saved_it(workflow: dict[str, Any], template: Path) -> None:
    text = template.read_text(encoding="utf-8")
    for word in ("localized_name", "/home", "/root", "C:\\", "frontendVersion"):
        assert word not in text
    assert workflow["extra"] == {}
    for node in workflow["nodes"]:
        if node["type"].startswith("Magi2"):
            assert node["properties"]["cnr_id"] == "magi2-native"
            assert node["properties"]["ver"]


def test_the_example_captions_are_in_a_template_word_for_word_and_in_the_docs() -> None:
    files = {path.stem: path.read_text(encoding="utf-8").strip() for path in (WORKFLOWS / "captions").glob("*.json")}
    twin = json.loads((WORKFLOWS / "api" / "caption_examples.json").read_text(encoding="utf-8"))
    captions = [node for node in twin.values() if node["class_type"] == "Magi2Caption"]
    assert {node["_meta"]["title"]: node["inputs"]["edited_caption"] for node in captions} == files
    for_picture = {node["_meta"]["title"] for node in captions if node["inputs"]["for_picture"]}
    assert for_picture == {name for name in files if name.startswith("picture_")}
    docs = (WORKFLOWS.parent / "docs" / "prompting.md").read_text(encoding="utf-8")
    assert [name for name in files if f"`{name}.json`" not in docs] == []
