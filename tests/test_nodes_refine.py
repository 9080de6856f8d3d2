"""Magi2Refine, and clips that are too large to be frames (50, 60 §3)."""

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import magi2_native.distributed.pool as pool_module
import magi2_native.stages.decode
import pytest
import torch
from magi2_native.headless.run import run_workflow
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.stages.folders import Folders
from magi2_native.stages.manager import manager
from magi2_native.tests.comfy_server.client import node_of, small_prompt
from magi2_native.tests.comfy_stub import execute, refusal
from magi2_native.tests.comfy_stub.fake_pool import FakePool
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in, write_checkpoint


@pytest.fixture(params=[Exception, BaseException], ids=["interrupt-is-Exception", "interrupt-is-BaseException"])
def any_graph(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path, request.param, without=()) as graph:
        yield graph


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path, without=()) as graph:
        yield graph


def refine(graph: Graph, latent: Any = None, **inputs: Any) -> Any:
    latent = graph.latent(seed=11) if latent is None else latent
    return graph.run("Magi2Refine", model=graph.model(), latent=latent, conditioning=graph.conditioning(), **inputs)


def last_call(graph: Graph) -> tuple[str, dict[str, Any]]:
    return graph.pools[-1].calls[-1]


# ---- the stage


def test_the_refiner_gets_what_it_needs_and_goes_on_with_the_clips_own_noise(graph: Graph) -> None:
    preview = graph.latent(seed=11)
    refined = refine(graph, preview)
    call, arguments = last_call(graph)
    assert call == "refine"
    assert torch.equal(arguments["video"], preview["video"])
    assert torch.equal(arguments["audio"], preview["audio"])
    assert {"features", "null_features"} <= set(arguments)
    assert (arguments["seed"], arguments["noise_device"]) == (11, "cpu")
    # 50 §2: the released settings
    assert arguments["settings"] == {
        "width": 1088, "height": 1920, "steps": 5, "shift": 5.0, "noise_value": 220, "video_txt_guidance_scale": 2.0,
        "audio_txt_guidance_scale": 5.0, "audio_noise_scale": -1.0, "use_cfg_trick": False,
        "cfg_trick_start_frame": 13, "cfg_trick_value": 2.0, "attention": "auto",
    }  # fmt: skip
    assert refined["video"].shape == (48, 63, 120, 68)
    assert refined["audio"] is preview["audio"], "the sound stays the preview's"
    assert refined["meta"]["fps"] == "25"
    assert refined["meta"]["prompt"] == preview["meta"]["prompt"]
    assert json.loads(json.dumps(refined["meta"])) == refined["meta"]


@pytest.mark.parametrize(("size", "refined"), [((48, 32), (1920, 1088)), ((32, 48), (1088, 1920))])
def test_the_shape_of_the_preview_decides_the_orientation(
    graph: Graph, size: tuple[int, int], refined: tuple[int, int]
) -> None:
    options = graph.run("Magi2SamplerOptions", width=size[0], height=size[1], noise_device="cpu")
    refine(graph, graph.latent(options=options))
    settings = last_call(graph)[1]["settings"]
    assert (settings["width"], settings["height"]) == refined


def test_every_option_reaches_the_refiner(graph: Graph) -> None:
    refine(
        graph, steps=3, video_guidance=0.0, noise_value=0, shift=2.5, width=64, height=32, audio_noise_scale=0.5,
        audio_guidance=3.0, use_cfg_trick=True, cfg_trick_start_frame=4, cfg_trick_value=1.0, refiner_seed=2**64 - 1,
        attention="gather",
    )  # fmt: skip
    arguments = last_call(graph)[1]
    assert arguments["seed"] == 2**64 - 1
    assert arguments["settings"] == {
        "width": 64, "height": 32, "steps": 3, "shift": 2.5, "noise_value": 0, "video_txt_guidance_scale": 0.0,
        "audio_txt_guidance_scale": 3.0, "audio_noise_scale": 0.5, "use_cfg_trick": True, "cfg_trick_start_frame": 4,
        "cfg_trick_value": 1.0, "attention": "gather",
    }  # fmt: skip


def test_a_latent_without_a_history_can_be_refined(graph: Graph) -> None:
    joined = graph.run("Magi2JoinLatent", latent={"samples": torch.zeros(1, 48, 3, 2, 2)})
    refined = refine(graph, joined, width=32, height=32)
    assert refined["video"].shape[1] == 5
    assert refined["meta"]["fps"] == "25"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 1001}, "to 1000|at most 1000"),
        ({"shift": 0.0}, "shift"),
        ({"noise_value": 1000}, "0 to 999"),
        ({"audio_noise_scale": float("inf")}, "audio_noise_scale"),
        ({"width": 1920, "height": 1080}, "multiples of 16.*1088 lines"),
        ({"width": 1920, "height": 0}, "both sides"),
        ({"width": 8192, "height": 16}, "at most 4096"),
        ({"refiner_seed": -2}, "seed"),
        ({"attention": "none"}, "'none'"),
    ],
)
def test_bad_values_are_refused_at_both_doors(graph: Graph, inputs: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(graph.nodes["Magi2Refine"], **inputs))
    with pytest.raises(ValueError, match=message):
        refine(graph, **inputs)
    assert last_call(graph)[0] != "refine", "no rank hears of it"


def test_the_released_settings_pass_the_check(graph: Graph) -> None:
    defaults = {slot.id: slot.extra["default"] for slot in graph.nodes["Magi2Refine"].GET_SCHEMA().inputs[3:]}
    assert refusal(graph.nodes["Magi2Refine"], **defaults) == ""


def test_what_cannot_be_refined_is_refused(graph: Graph) -> None:
    refined = refine(graph, width=32, height=32)
    with pytest.raises(ValueError, match="refined already"):
        refine(graph, refined)
    broken = {**graph.latent(), "video": torch.full((48, 2, 2, 2), float("nan"))}
    with pytest.raises(ValueError, match="NaN"):
        refine(graph, broken)


def test_a_refined_latent_keeps_its_frame_rate_in_a_file(graph: Graph) -> None:
    refined = refine(graph, width=32, height=32)
    graph.run("Magi2SaveLatent", magi2_latent=refined, filename_prefix="magi2/refined")
    loaded = graph.run("Magi2LoadLatent", latent="magi2/refined_00001_.safetensors")
    assert loaded["meta"] == refined["meta"]
    assert graph.run("Magi2Decode", model=graph.model(), latent=loaded)[3] == 25.0


@pytest.mark.parametrize("stage", ["refine", "write_clip"])
def test_cancel_stops_the_job_and_leaves_no_file(any_graph: Graph, stage: str) -> None:
    model, latent, conditioning = any_graph.model(), any_graph.latent(), any_graph.conditioning()
    node, inputs = {
        "refine": ("Magi2Refine", {"conditioning": conditioning}),
        "write_clip": ("Magi2Decode", {"make_frames": "never"}),
    }[stage]
    management = any_graph.stub.model_management
    any_graph.pools[-1].on_call = lambda call: management.interrupt_current_processing(call == stage)
    with pytest.raises(management.InterruptProcessingException):
        any_graph.run(node, model=model, latent=latent, **inputs)
    assert any_graph.pools[-1].cancelled == [stage]
    assert list((any_graph.stub.folder_paths.base / "temp").iterdir()) == []


def test_the_residual_of_the_refiner_is_chosen_with_the_checkpoint(graph: Graph) -> None:
    assert graph.model().plan.refiner_residual == "float32"
    assert graph.model(refiner_residual="bfloat16").plan.refiner_residual == "bfloat16"


# ---- clips that are too large to be frames


def test_1080p_is_too_large_and_540p_is_not() -> None:
    decode = magi2_native.stages.decode
    assert decode.image_bytes(1920, 1088, 249) == pytest.approx(6.2e9, rel=0.01)
    assert decode.image_bytes(1920, 1088, 249) > decode.MOST_IMAGE_BYTES > decode.image_bytes(896, 512, 125)


def test_a_large_clip_goes_straight_to_a_file_and_the_node_says_so(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph.stub.module("stages.decode"), "MOST_IMAGE_BYTES", 1000)
    blocked: list[str | None] = []
    monkeypatch.setattr(graph.stub.module("nodes.decode"), "missing_output", lambda why=None: blocked.append(why))
    refined = refine(graph, width=64, height=32)
    result = execute(graph.nodes["Magi2Decode"], model=graph.model(), latent=refined, node_id="6")
    frames, sound, video, fps = result.args
    assert [call for call, _ in graph.pools[-1].calls if "video" in call or "clip" in call] == ["write_clip"]
    assert frames is None
    assert fps == 25.0
    assert sound["waveform"].shape == (1, 2, 441_000)
    path = Path(video.get_stream_source())
    assert path.parent == graph.stub.folder_paths.base / "temp"
    facts = read_back(path)
    assert (facts.frames, facts.width, facts.height, facts.frame_rate) == (249, 64, 32, 25)
    assert facts.samples == 441_000
    text = result.ui.value
    assert text.startswith("249 frames of 64x32 went straight to the video.")
    assert "set make_frames to always" in text
    assert ("6", text) in graph.stub.server.texts
    assert text in blocked, "a node that wants the frames shows the same"


@pytest.mark.parametrize(("make_frames", "call"), [("always", "decode_video"), ("never", "write_clip")])
def test_the_user_decides_whether_frames_are_made(
    graph: Graph, monkeypatch: pytest.MonkeyPatch, make_frames: str, call: str
) -> None:
    monkeypatch.setattr(graph.stub.module("stages.decode"), "MOST_IMAGE_BYTES", 1000)
    latent = graph.latent()
    frames, _, video, _ = graph.run("Magi2Decode", model=graph.model(), latent=latent, make_frames=make_frames)
    assert last_call(graph)[0] == call
    if make_frames == "always":
        assert video.get_components().images is frames
    else:
        assert Path(video.get_stream_source()).is_file()


def test_a_small_refined_clip_is_frames_at_25_a_second(graph: Graph) -> None:
    frames, _, video, fps = graph.run("Magi2Decode", model=graph.model(), latent=refine(graph, width=32, height=32))
    assert frames.shape == (249, 32, 32, 3)
    assert video.get_components().frame_rate == Fraction(25)
    assert fps == 25.0


def test_a_large_clip_without_sound_has_none_in_its_file(graph: Graph) -> None:
    latent = graph.latent()
    video = graph.run(
        "Magi2Decode", model=graph.model(), latent=latent, parts="video only", make_frames="never"
    )[2]  # fmt: skip
    assert read_back(video.get_stream_source()).sample_rate == 0
    assert [call for call, _ in graph.pools[-1].calls if call == "decode_audio"] == []


@pytest.mark.parametrize("make_frames", ["always", "never"])
def test_frames_are_delivered_at_another_size(graph: Graph, make_frames: str) -> None:
    size = {"output_width": 30, "output_height": 20}
    outputs = graph.run("Magi2Decode", model=graph.model(), latent=graph.latent(), make_frames=make_frames, **size)
    if make_frames == "always":
        assert outputs[0].shape == (125, 20, 30, 3)
        # the frames are one shade each, and 40 §6 truncates: at most one below it
        shades = (outputs[0][:, 0, 0, 0] * 255).round()
        assert ((torch.arange(125) - shades).abs() <= 1).all()
    else:
        facts = read_back(outputs[2].get_stream_source())
        assert (facts.width, facts.height) == (30, 20)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"make_frames": "maybe"}, "auto, always, never"),
        ({"output_width": 1920, "output_height": 0}, "both sides"),
        ({"output_width": 1919, "output_height": 1080}, "even"),
        ({"output_width": 10_000, "output_height": 2}, "2 to 8192"),
    ],
)
def test_bad_outputs_are_refused_at_both_doors(graph: Graph, inputs: dict[str, Any], message: str) -> None:
    assert message in graph.nodes["Magi2Decode"].validate_inputs(**inputs)
    with pytest.raises(ValueError, match=message):
        graph.run("Magi2Decode", model=graph.model(), latent=graph.latent(), **inputs)


# ---- without ComfyUI


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folders]:
    write_checkpoint(tmp_path / "models" / "MAGI-2-Preview", without=())
    monkeypatch.setattr(manager, "_make_pool", lambda model: FakePool(model, pool_module))
    yield Folders((tmp_path / "models",), tmp_path / "output", tmp_path / "input")
    manager.stop()


def test_a_workflow_runs_with_a_clip_that_is_a_file_and_leaves_nothing_else(folders: Folders) -> None:
    workflow = small_prompt("preview_to_1080p")
    workflow[node_of(workflow, "Magi2Decode")]["inputs"]["make_frames"] = "never"
    workflow["again"] = json.loads(json.dumps(workflow[node_of(workflow, "SaveVideo")]))
    clips = [path for path in run_workflow(workflow, folders, Silent()) if path.suffix == ".mp4"]
    assert [path.name for path in clips] == ["magi2_00001_.mp4", "magi2_00002_.mp4"]
    for clip in clips:
        facts = read_back(clip)
        assert (facts.frames, facts.width, facts.height, facts.frame_rate) == (249, 128, 64, 25)
        assert facts.samples == 441_000
    assert {path.name for path in folders.output.iterdir()} == {"video", "magi2"}


def test_a_workflow_that_waits_for_an_edit_says_so(folders: Folders) -> None:
    workflow = small_prompt("caption_to_clip")
    workflow[node_of(workflow, "Magi2Caption")]["inputs"]["stop_to_edit"] = True
    with pytest.raises(RequestError, match="waits for its caption to be edited"):
        run_workflow(workflow, folders, Silent())
