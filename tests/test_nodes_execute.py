"""From a checkpoint and a prompt to latents, run as ComfyUI runs it, with a pool that has no processes behind it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.tests.comfy_stub import execute, refusal
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path) as graph:
        yield graph


def calls(graph: Graph) -> list[str]:
    return [call for pool in graph.pools for call, _ in pool.calls]


# ---- loader


def test_the_loader_lists_checkpoint_folders_and_shows_the_plan(graph: Graph, tmp_path: Path) -> None:
    (tmp_path / "models/magi2/other/mini/preview").mkdir(parents=True)
    (tmp_path / "models/magi2/other/mini/preview/model.safetensors").touch()
    (tmp_path / "models/magi2/not_one").mkdir()
    (combo,) = (slot for slot in graph.nodes["Magi2LoadCheckpoint"].GET_SCHEMA().inputs if slot.id == "checkpoint")
    assert combo.extra["options"] == ["mini", "other/mini"]
    model, text = graph.run("Magi2LoadCheckpoint", checkpoint="mini", devices="2xcpu", node_id="4")
    assert [rank.device for rank in model.plan.ranks] == ["cpu", "cpu"]
    assert "2 rank(s)" in text
    assert ("4", text) in graph.stub.server.texts
    assert graph.pools == [], "planning starts no workers"


def test_the_loader_says_what_is_wrong_before_anything_runs(graph: Graph, tmp_path: Path) -> None:
    check = graph.nodes["Magi2LoadCheckpoint"].validate_inputs
    assert check(checkpoint="mini", devices="0, 1", layout="sp2", dtype="float32", residency="swap") is True
    assert "Found there: mini" in check(checkpoint="none")
    (tmp_path / "models/magi2/linked").symlink_to(tmp_path / "models/magi2/mini")
    assert "Found there: linked, mini" in check(checkpoint="none")
    assert "Found there" in check(checkpoint="../magi2/mini")
    assert "is not a device" in check(devices="gpu one")
    assert "is not a device" in check(devices="-1")
    assert "more than 1024 workers" in check(devices="9999999999xcpu")
    assert "more than 1024 workers" in check(devices="1000xcpu,25xcpu")
    assert "sp4" in check(layout="diagonal")
    assert "bfloat16, float32" in check(dtype="int4")


def test_the_loader_refuses_devices_that_are_not_there_and_names_those_that_are(graph: Graph) -> None:
    with pytest.raises(ValueError, match="this process sees cpu"):
        graph.model(devices="cuda:7")


def test_auto_takes_the_devices_that_the_server_sets(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI2_DEVICES", "3xcpu")
    assert len(graph.model(devices="auto", layout="sp3").plan.ranks) == 3
    monkeypatch.setenv("MAGI2_DEVICES", "auto")
    assert len(graph.model(devices="auto").plan.ranks) == 1
    monkeypatch.setenv("MAGI2_DEVICES", "gpu0")
    with pytest.raises(ValueError, match=r"variable MAGI2_DEVICES cannot be used\. 'gpu0' in"):
        graph.model(devices="auto")


def test_a_plan_that_does_not_fit_is_refused_unless_the_user_insists(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph.stub.module("magi2_core.memory.plan"), "device_memory", lambda device: 1 << 20)
    with pytest.raises(ValueError, match="start_anyway"):
        graph.model()
    assert graph.model(start_anyway=True).plan.shortage


def test_a_replaced_weight_file_changes_the_fingerprint_and_the_model(graph: Graph, tmp_path: Path) -> None:
    fingerprint = graph.nodes["Magi2LoadCheckpoint"].fingerprint_inputs
    before, model = fingerprint(checkpoint="mini", devices="auto"), graph.model()
    assert fingerprint(checkpoint="mini", devices="auto") == before
    index = tmp_path / "models/magi2/mini/preview/model.safetensors.index.json"
    index.write_text(index.read_text() + " ")
    assert fingerprint(checkpoint="mini", devices="auto") != before
    assert graph.model() != model
    assert fingerprint(checkpoint="gone") == "gone", "a fingerprint never raises"


NAMED = pytest.mark.parametrize(
    ("node", "name"), [("Magi2LoadCheckpoint", "checkpoint"), ("Magi2LoadLatent", "latent")]
)


@NAMED
@pytest.mark.parametrize("value", [5, ["x"], "a" * 300, "a\0b"])
def test_what_is_no_name_of_a_file_gets_a_sentence(graph: Graph, node: str, name: str, value: Any) -> None:
    assert re.match(r"The name of the|There is no", graph.nodes[node].validate_inputs(**{name: value}))
    with pytest.raises(ValueError, match=r"The name of the|There is no"):
        graph.run(node, **{name: value})


def test_a_name_that_is_missing_gets_a_sentence(graph: Graph) -> None:
    with pytest.raises(ValueError, match="name of the checkpoint is None; it must be text"):
        graph.run("Magi2LoadCheckpoint", checkpoint=None)


@NAMED
def test_a_linked_name_leaves_the_cache_to_the_node_that_gives_it(graph: Graph, node: str, name: str) -> None:
    assert graph.nodes[node].fingerprint_inputs(**{name: None}) is None


# ---- prompt and picture


def test_conditioning_is_plain_values_that_outlive_the_pool(graph: Graph) -> None:
    conditioning = graph.conditioning("a cat and a dog", "noise")
    graph.manager.stop()
    assert conditioning["features"].shape[0] == 5
    assert conditioning["markers"].shape[0] == 0
    assert isinstance(conditioning, dict)


@pytest.mark.parametrize("prompt", ["", "   \n", "nul \0", "half \ud800"])
def test_an_unusable_prompt_is_refused_before_any_worker_starts(graph: Graph, prompt: str) -> None:
    assert isinstance(graph.nodes["Magi2EncodePrompt"].validate_inputs(prompt=prompt), str)
    with pytest.raises(ValueError, match="prompt"):
        graph.conditioning(prompt)
    assert graph.pools == []


def test_an_empty_negative_prompt_is_allowed_and_warnings_reach_the_node(graph: Graph) -> None:
    assert graph.nodes["Magi2EncodePrompt"].validate_inputs(prompt="x", negative_prompt="") is True
    result = execute(
        graph.nodes["Magi2EncodePrompt"], model=graph.model(), prompt="warn me", negative_prompt="", node_id="9"
    )
    assert "a warning" in result.ui.value


def test_a_picture_encodes_the_prompt_again_with_its_marker(graph: Graph) -> None:
    conditioning = graph.run(
        "Magi2ImageConditioning", conditioning=graph.conditioning(), image=torch.rand(1, 90, 160, 3)
    )
    assert conditioning["markers"].shape[0] == 1
    assert conditioning["pictures"][0].shape == (90, 160, 3)
    assert [arguments["figures"] for _, arguments in graph.pools[0].calls] == [[], [1]]


def test_a_prompt_encoded_for_a_picture_is_not_encoded_twice(graph: Graph) -> None:
    conditioning = graph.conditioning(for_picture=True)
    graph.run("Magi2ImageConditioning", conditioning=conditioning, image=torch.rand(1, 8, 8, 3))
    assert calls(graph) == ["encode_text"]


def test_a_prompt_encoded_for_a_picture_that_never_came_is_refused(graph: Graph) -> None:
    with pytest.raises(ValueError, match="no picture arrived"):
        graph.latent(conditioning=graph.conditioning(for_picture=True))


def test_the_node_shows_the_size_that_is_really_used(graph: Graph) -> None:
    node = graph.nodes["Magi2ImageConditioning"]
    result = execute(node, conditioning=graph.conditioning(), image=torch.rand(1, 720, 1280, 3))
    assert "448x224 at 272p" in result.ui.value
    assert "896x480 at 540p" in result.ui.value


@pytest.mark.parametrize("shape", [(1, 1, 1, 3), (1, 37, 91, 3), (1, 20, 30, 4), (1, 20, 30, 1), (20, 30, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_pictures_of_all_kinds_become_rgb_bytes(graph: Graph, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    image = torch.linspace(-0.5, 1.5, torch.Size(shape).numel()).view(shape).to(dtype)
    conditioning = graph.run("Magi2ImageConditioning", conditioning=graph.conditioning(), image=image)
    (picture,) = conditioning["pictures"]
    assert picture.dtype == torch.uint8
    assert picture.shape == (shape[-3], shape[-2], 3)


def test_picture_values_are_rounded_and_clipped(graph: Graph) -> None:
    image = torch.tensor([-1.0, 0.4999 / 255, 0.5001 / 255, 2.0]).view(1, 1, 4, 1).expand(1, 1, 4, 3)
    conditioning = graph.run("Magi2ImageConditioning", conditioning=graph.conditioning(), image=image)
    assert conditioning["pictures"][0][0, :, 0].tolist() == [0, 0, 1, 255]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (torch.rand(17, 8, 8, 3), "17 pictures"),
        (torch.rand(1, 8, 8, 2), "shape"),
        (torch.full((1, 8, 8, 3), float("nan")), "not finite"),
        (torch.rand(1, 10, 4000, 3), "too long and narrow"),
    ],
)
def test_pictures_that_cannot_be_used_are_refused_in_a_sentence(
    graph: Graph, image: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        graph.run("Magi2ImageConditioning", conditioning=graph.conditioning(), image=image)


@pytest.mark.parametrize("batched", [True, False], ids=["in a batch", "from two nodes"])
def test_more_pictures_are_figures_in_the_order_in_which_they_come(graph: Graph, batched: bool) -> None:
    images = torch.stack([torch.full((8, 8, 3), value) for value in (0.0, 0.5, 1.0)])
    conditioning = graph.conditioning(for_picture=True)
    for part in [images] if batched else images.split(1):
        conditioning = graph.run("Magi2ImageConditioning", conditioning=conditioning, image=part)
    assert conditioning["figures"] == [1, 2, 3]
    assert [int(picture[0, 0, 0]) for picture in conditioning["pictures"]] == [0, 128, 255]
    assert conditioning["markers"].shape[0] == 3
    assert graph.pools[0].calls[-1][1]["figures"] == [1, 2, 3]
    graph.latent(conditioning=conditioning)
    (image_call,) = [arguments for call, arguments in graph.pools[0].calls if call == "encode_image"]
    assert len(image_call["pictures"]) == 3


@pytest.mark.parametrize("parts", [[10], [9, 1]], ids=["in a batch", "from two nodes"])
def test_ten_pictures_come_in_the_references_order(graph: Graph, parts: list[int]) -> None:
    """30 §5: as words, <Figure 10> before <Figure 1>. What is shown goes by number."""
    images = torch.stack([torch.full((8, 8, 3), value / 255) for value in range(1, 11)])
    conditioning = graph.conditioning()
    for part in images.split(parts):
        result = execute(graph.nodes["Magi2ImageConditioning"], node_id="2", conditioning=conditioning, image=part)
        (conditioning,) = result.args
    assert conditioning["figures"] == [10, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [int(picture[0, 0, 0]) for picture in conditioning["pictures"]] == conditioning["figures"]
    assert graph.pools[0].calls[-1][1]["figures"] == conditioning["figures"]
    *lines, tokens = result.ui.value.splitlines()
    assert [line.split(":")[0] for line in lines] == [f"<Figure {i}>" for i in range(1, 11)]
    assert tokens == f"{conditioning['tokens']} tokens"


def test_a_picture_node_passes_on_what_the_encoder_warns_of(graph: Graph) -> None:
    node = graph.nodes["Magi2ImageConditioning"]
    result = execute(node, conditioning=graph.conditioning("warn me"), image=torch.rand(2, 8, 8, 3), node_id="2")
    assert result.ui.value.splitlines()[-1] == "a warning"


def test_pictures_of_different_sizes_are_refused_by_name(graph: Graph) -> None:
    first = graph.run("Magi2ImageConditioning", conditioning=graph.conditioning(), image=torch.rand(1, 90, 160, 3))
    with pytest.raises(ValueError, match=r"different sizes \(<Figure 1> 448x224, <Figure 2> 224x448\)"):
        graph.run("Magi2ImageConditioning", conditioning=first, image=torch.rand(1, 160, 90, 3))


def test_pictures_of_other_sizes_that_come_to_the_same_are_taken(graph: Graph) -> None:
    first = graph.run("Magi2ImageConditioning", conditioning=graph.conditioning(), image=torch.rand(1, 90, 160, 3))
    second = graph.run("Magi2ImageConditioning", conditioning=first, image=torch.rand(1, 180, 320, 3))
    assert second["figures"] == [1, 2]


# ---- sampler


def test_the_sampler_sends_what_the_engine_needs_and_records_it(graph: Graph) -> None:
    latent = graph.latent(seed=2**64 - 1)
    call, arguments = graph.pools[0].calls[-1]
    assert call == "sample"
    assert (arguments["width"], arguments["height"], arguments["seed"]) == (32, 48, 2**64 - 1)
    assert arguments["image_latents"] is None
    assert arguments["guidance"]["audio_txt_guidance_scale"] == 7.0
    assert latent["video"].shape == (48, 32, 3, 2)
    assert latent["meta"]["seed"] == 2**64 - 1
    assert json.loads(json.dumps(latent["meta"])) == latent["meta"]


def test_a_picture_is_encoded_at_the_size_that_is_sampled(graph: Graph) -> None:
    conditioning = graph.run(
        "Magi2ImageConditioning", conditioning=graph.conditioning(), image=torch.rand(1, 90, 160, 3)
    )
    graph.latent(conditioning=conditioning, options=None, orientation="portrait")
    (image_call,) = [arguments for call, arguments in graph.pools[0].calls if call == "encode_image"]
    assert (image_call["width"], image_call["height"]) == (256, 448)
    assert graph.pools[0].calls[-1][1]["image_latents"].shape == (1, 48, 1, 2, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0), ("steps", 1001), ("seed", -1), ("seed", 2**64), ("shift", 0.0), ("video_guidance", float("inf")),
        ("resolution", "1080p"), ("orientation", "square"), ("steps", "many"), ("seed", [1]),
    ],
)  # fmt: skip
def test_bad_sampler_values_are_refused_at_both_doors(graph: Graph, name: str, value: Any) -> None:
    assert name in refusal(graph.nodes["Magi2Sampler"], **{name: value})
    refused_by_the_stage(graph, name, value)


@pytest.mark.parametrize("name", ["shift", "video_guidance", "audio_guidance"])
def test_what_is_no_number_reaches_no_rank(graph: Graph, name: str) -> None:
    """ComfyUI lets it through, as it is neither too small nor too large."""
    refused_by_the_stage(graph, name, float("nan"))


def refused_by_the_stage(graph: Graph, name: str, value: Any) -> None:
    inputs = graph.sampler_inputs()
    before = len(calls(graph))
    with pytest.raises((ValueError, TypeError)):
        graph.run("Magi2Sampler", **{**inputs, name: value})
    assert len(calls(graph)) == before, "no rank hears of it"


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63, 2**64 - 1])
def test_these_are_all_seeds(graph: Graph, seed: int) -> None:
    assert refusal(graph.nodes["Magi2Sampler"], seed=seed) == ""
    assert graph.latent(seed=seed)["meta"]["seed"] == seed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 40, "height": 48}, "multiples of 16"),
        ({"width": 48, "height": 0}, "both sides"),
        ({"width": 65536, "height": 65536}, "at most 2048"),
        ({"noise_device": "tpu"}, "noise_device"),
        ({"cfg_rescale": -1.0}, "cfg_rescale"),
        ({"dynamic_cfg_start_t": 1001}, "0 to 1000"),
    ],
)
def test_bad_options_are_refused_at_both_doors(graph: Graph, changes: dict[str, Any], message: str) -> None:
    node = graph.nodes["Magi2SamplerOptions"]
    assert message in refusal(node, **changes)
    with pytest.raises(ValueError, match=message):
        graph.run("Magi2SamplerOptions", **{"width": 0, "height": 0, "noise_device": "cpu", **changes})


def test_options_reach_the_guidance(graph: Graph) -> None:
    options = graph.run("Magi2SamplerOptions", width=0, height=0, noise_device="cpu", use_cfg_trick=True)
    graph.latent(options=options)
    arguments = graph.pools[0].calls[-1][1]
    assert arguments["guidance"]["use_cfg_trick"] is True
    assert (arguments["width"], arguments["height"]) == (448, 256)


# ---- progress


def test_progress_that_nobody_can_see_does_not_raise(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """80 line 3: a node without a number, then no server."""
    comfy, progress = graph.stub.module("nodes.comfy"), graph.stub.module("nodes.progress")
    events = progress.NodeEvents(None)
    events.progress("sample", 1, 2)
    events.log("a line")
    assert graph.stub.server.texts == [], "the page has no place for it"
    monkeypatch.setattr(comfy, "server", lambda: None)
    events = progress.NodeEvents("7")
    events.progress("sample", 1, 2)
    events.log("a line")
    comfy.send("magi2.status", {})
    assert graph.stub.server.texts == []


def test_progress_shows_steps_time_left_and_a_preview_that_moves(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = graph.stub.module("nodes.progress")
    monkeypatch.setattr(progress, "wan_colours", lambda: ([[0.1, 0.2, 0.3]] * 48, [0.0, 0.0, 0.0]))
    clock = iter(range(10_000))
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    graph.latent(steps=6)
    lines = [text for _, text in graph.stub.server.texts if text.startswith("Sampling")]
    assert lines[-1].startswith("Sampling 6/6, ")
    assert any("s/step" in line and "left" in line for line in lines)
    assert graph.stub.server.progress[-1][:2] == (6, 6)
    previews = [preview for _, _, preview in graph.stub.server.progress if preview is not None]
    assert len(previews) >= 2
    kind, picture, longest = previews[0]
    assert kind == "JPEG"
    assert max(picture.size) <= longest == 512


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("refine", "Refining 2/5, 61.0 s/step, 3 min 03 s left"),
        ("load", "Loading weights 2/5, 3 min 03 s left"),
        ("something", "something 2/5, 3 min 03 s left"),
    ],
)
def test_every_stage_shows_the_time_left(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, stage: str, line: str
) -> None:
    progress = graph.stub.module("nodes.progress")
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    events = progress.NodeEvents("9")
    events.progress("sample", 3, 4)
    for done in range(3):
        now[0] += 61.0
        events.progress(stage, done, 5)
    assert graph.stub.server.texts[-1] == ("9", line)


def test_updates_are_at_most_ten_a_second_but_the_last_one_always_comes(graph: Graph) -> None:
    before = len(graph.stub.server.progress)
    graph.latent(steps=167)
    updates = graph.stub.server.progress[before:]
    assert len(updates) < 20
    assert updates[-1][:2] == (167, 167)
