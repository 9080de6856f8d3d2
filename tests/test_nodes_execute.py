"""What each node does with graph values, run as ComfyUI runs it, with a pool that has no processes behind it."""

import io
import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from magi2_native.magi2_core.codecs.media import Sound, read_back, write_video
from magi2_native.stages.decode import image_blocks
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


# ---- decode


def test_decoding_gives_frames_sound_and_a_video_with_the_exact_rate(graph: Graph) -> None:
    frames, sound, video, fps = graph.run("Magi2Decode", model=graph.model(), latent=graph.latent())
    assert frames.shape == (125, 48, 32, 3)
    assert frames.dtype == torch.float32
    assert frames.is_contiguous()
    # SaveVideo multiplies by 255 and truncates; the bytes must come back exactly
    assert torch.equal((frames[:, 0, 0, 0] * 255).to(torch.uint8), torch.arange(125, dtype=torch.uint8))
    assert sound["waveform"].shape == (1, 2, 441_000)
    assert sound["waveform"].abs().max() <= 1
    assert sound["sample_rate"] == 44_100
    components = video.get_components()
    assert components.frame_rate == Fraction(25, 2)
    assert components.images is frames, "the video shares its frames"
    assert components.audio is sound
    assert fps == 12.5


def clip_with_sound(graph: Graph) -> Any:
    return graph.run("Magi2Decode", model=graph.model(), latent=graph.latent())[2]


def test_the_video_is_saved_by_the_packs_own_writer_with_the_workflow_in_it(graph: Graph, tmp_path: Path) -> None:
    """ComfyUI's writer gives equal frames other bytes (80 line 27), at a lower quality."""
    video = clip_with_sound(graph)
    video.save_to(str(tmp_path / "saved.mp4"), format="mp4", codec="h264", metadata={"prompt": {"1": {"inputs": {}}}})
    facts = read_back(tmp_path / "saved.mp4")
    assert (facts.frames, facts.width, facts.height, facts.frame_rate) == (125, 32, 48, Fraction(25, 2))
    assert (facts.samples, facts.sample_rate, facts.channels) == (441_000, 44_100, 2)
    with av.open(str(tmp_path / "saved.mp4")) as file:
        assert json.loads(file.metadata["prompt"]) == {"1": {"inputs": {}}}
    video.save_to(str(tmp_path / "bare.mp4"))
    frames, sound = image_blocks(video.get_components().images), video.get_components().audio
    write_video(tmp_path / "own.mp4", frames, Fraction(25, 2), Sound(sound["waveform"][0]))
    assert (tmp_path / "bare.mp4").read_bytes() == (tmp_path / "own.mp4").read_bytes()


def test_what_the_packs_writer_does_not_offer_is_left_to_comfyui(graph: Graph, tmp_path: Path) -> None:
    video = clip_with_sound(graph)
    stream = io.BytesIO()
    for arguments in ((stream, "mp4", "h264", None), (str(tmp_path / "a.webm"), "webm", "vp9", {})):
        video.save_to(*arguments)
        assert video.saved == arguments


def test_cancel_stops_the_saving_and_leaves_no_file(graph: Graph, tmp_path: Path) -> None:
    video, folder = clip_with_sound(graph), tmp_path / "saved"
    folder.mkdir()
    graph.stub.model_management.interrupt_current_processing(True)
    with pytest.raises(graph.stub.model_management.InterruptProcessingException):
        video.save_to(str(folder / "clip.mp4"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("parts", "wanted"), [("video only", "decode_video"), ("sound only", "decode_audio")])
def test_half_a_clip_can_be_decoded_alone(graph: Graph, parts: str, wanted: str) -> None:
    latent = graph.latent()
    frames, sound, _, _ = graph.run("Magi2Decode", model=graph.model(), latent=latent, parts=parts)
    assert [call for call in calls(graph) if call.startswith("decode")] == [wanted]
    assert isinstance(frames, torch.Tensor) == (parts == "video only")
    assert isinstance(sound, dict) == (parts == "sound only")


def test_a_latent_without_sound_gives_a_silent_clip(graph: Graph) -> None:
    silent = graph.run("Magi2JoinLatent", latent={"samples": torch.zeros(1, 48, 3, 2, 2)})
    frames, sound, video, _ = graph.run("Magi2Decode", model=graph.model(), latent=silent)
    assert frames.shape[0] == 9
    assert not isinstance(sound, dict)
    assert video.get_components().audio is None
    with pytest.raises(ValueError, match="no sound"):
        graph.run("Magi2Decode", model=graph.model(), latent=silent, parts="sound only")


def test_a_broken_latent_is_not_decoded(graph: Graph) -> None:
    latent = {**graph.latent(), "video": torch.full((48, 2, 2, 2), float("nan"))}
    with pytest.raises(ValueError, match="NaN"):
        graph.run("Magi2Decode", model=graph.model(), latent=latent)


# ---- latents


def test_a_split_latent_is_in_the_scale_of_the_core_vae_and_joins_back(graph: Graph) -> None:
    latent = graph.latent()
    core = graph.run("Magi2SplitLatent", magi2_latent=latent)
    assert core["samples"].shape == (1, 48, 32, 3, 2)
    # 40 §2: channel 0 has mean -0.2289 and std 0.4765
    expected = latent["video"][0] * 0.4765 - 0.2289
    torch.testing.assert_close(core["samples"][0, 0], expected)
    back = graph.run("Magi2JoinLatent", latent=core, sound_from=latent)
    torch.testing.assert_close(back["video"], latent["video"])
    assert back["audio"] is latent["audio"]
    assert back["meta"] == latent["meta"]


@pytest.mark.parametrize(
    ("samples", "message"), [(torch.zeros(1, 16, 3, 2, 2), "Wan 2.2"), (torch.zeros(2, 48, 3, 2, 2), "one at a time")]
)
def test_latents_of_other_kinds_are_refused(graph: Graph, samples: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph.run("Magi2JoinLatent", latent={"samples": samples})


def test_a_latent_is_saved_and_loaded_unchanged_with_what_made_it(graph: Graph, tmp_path: Path) -> None:
    latent = graph.latent()
    result = execute(graph.nodes["Magi2SaveLatent"], magi2_latent=latent, filename_prefix="magi2/clip é 1")
    (saved,) = result.ui["latents"]
    assert (tmp_path / "output" / saved["subfolder"] / saved["filename"]).is_file()
    (combo,) = graph.nodes["Magi2LoadLatent"].GET_SCHEMA().inputs
    (name,) = combo.extra["options"]
    assert graph.nodes["Magi2LoadLatent"].validate_inputs(latent=name) is True
    back = graph.run("Magi2LoadLatent", latent=name)
    assert torch.equal(back["video"], latent["video"])
    assert torch.equal(back["audio"], latent["audio"])
    assert back["meta"] == latent["meta"]


def test_saving_never_leaves_the_output_folder_nor_half_a_file(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="outside the output folder"):
        graph.run("Magi2SaveLatent", magi2_latent=graph.latent(), filename_prefix="../../evil")
    graph.run("Magi2SaveLatent", magi2_latent=graph.latent(), filename_prefix="deep\\name")
    assert [path.name for path in (tmp_path / "output" / "deep").iterdir()] == ["name_00001_.safetensors"]


@pytest.mark.parametrize("prefix", ["../../evil", "..\\evil", "/etc/x", "", " ", "a/../b", "a\nb", "a\0", "\ud800"])
def test_a_name_that_cannot_be_saved_under_is_refused_before_anything_runs(graph: Graph, prefix: str) -> None:
    assert "file name prefix" in str(graph.nodes["Magi2SaveLatent"].validate_inputs(filename_prefix=prefix))


@pytest.mark.parametrize("prefix", ["magi2/latent", "magi2/%year%/clip é 1", "deep\\name", "magi2/"])
def test_these_are_names_to_save_under(graph: Graph, tmp_path: Path, prefix: str) -> None:
    assert graph.nodes["Magi2SaveLatent"].validate_inputs(filename_prefix=prefix) is True
    graph.run("Magi2SaveLatent", magi2_latent=graph.latent(), filename_prefix=prefix)
    assert len(list((tmp_path / "output").rglob("*.safetensors"))) == 1


def test_a_failed_save_leaves_no_file(graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    latent = graph.latent()
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ValueError, match="cannot be written: No space"):
        graph.run("Magi2SaveLatent", magi2_latent=latent, filename_prefix="magi2/x")
    monkeypatch.undo()
    assert list((tmp_path / "output" / "magi2").iterdir()) == []


@pytest.mark.parametrize("name", ["magi2/none.safetensors", "../models/magi2/mini/magi2_preview.json", "", "/etc/x"])
def test_latents_are_only_read_from_the_output_and_input_folders(graph: Graph, name: str) -> None:
    assert "no latent file" in graph.nodes["Magi2LoadLatent"].validate_inputs(latent=name)
    with pytest.raises(ValueError, match="no latent file"):
        graph.run("Magi2LoadLatent", latent=name)


def test_files_that_are_no_latents_are_refused_by_name(graph: Graph, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "output" / "other.safetensors")
    (tmp_path / "output" / "broken.safetensors").write_bytes(b"version https://git-lfs")
    for name in ("other.safetensors", "broken.safetensors"):
        with pytest.raises(ValueError, match=name):
            graph.run("Magi2LoadLatent", latent=name)


# ---- unload


def test_unloading_ends_the_workers_and_passes_its_input_on(graph: Graph) -> None:
    graph.conditioning()
    assert graph.run("Magi2UnloadWorkers", what="workers", after="frames") == "frames"
    assert graph.pools[0].closed == 1
    assert not graph.manager.alive


def test_unloading_weights_keeps_the_workers(graph: Graph) -> None:
    graph.conditioning()
    graph.run("Magi2UnloadWorkers", what="weights")
    assert calls(graph)[-1] == "release"
    assert graph.manager.alive


def test_unloading_runs_again_only_after_workers_ran_again(graph: Graph) -> None:
    fingerprint = graph.nodes["Magi2UnloadWorkers"].fingerprint_inputs
    graph.conditioning()
    before = fingerprint(what="workers")
    assert fingerprint(what="workers") == before
    graph.conditioning("another")
    assert fingerprint(what="workers") != before
