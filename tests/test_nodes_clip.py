"""From latents to frames, sound and files, run as ComfyUI runs it, with a pool that has no processes behind it."""

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
from magi2_native.tests.comfy_stub import execute
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path) as graph:
        yield graph


def calls(graph: Graph) -> list[str]:
    return [call for pool in graph.pools for call, _ in pool.calls]


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


def test_a_clip_whose_temporary_file_is_gone_is_decoded_again(graph: Graph) -> None:
    fingerprint = graph.nodes["Magi2Decode"].fingerprint_inputs
    before = fingerprint(model=None, latent=None)
    *_, movie, _ = graph.run("Magi2Decode", model=graph.model(), latent=graph.latent(), make_frames="never")
    assert fingerprint(model=None, latent=None) == before
    Path(movie.get_stream_source()).unlink()
    assert fingerprint(model=None, latent=None) != before


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


def test_what_other_packs_keep_with_the_workflow_leaves_the_latent_readable(graph: Graph, tmp_path: Path) -> None:
    latent, path = graph.latent(), tmp_path / "x.safetensors"
    graph.stub.module("stages.latent").write_latent(latent, path, {"format": "theirs", "meta": "theirs", "prompt": {}})
    assert graph.stub.module("stages.latent").read_latent(path)["meta"] == latent["meta"]


def test_saving_never_leaves_the_output_folder_nor_half_a_file(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="outside the output folder"):
        graph.run("Magi2SaveLatent", magi2_latent=graph.latent(), filename_prefix="../../evil")
    graph.run("Magi2SaveLatent", magi2_latent=graph.latent(), filename_prefix="deep\\name")
    assert [path.name for path in (tmp_path / "output" / "deep").iterdir()] == ["name_00001_.safetensors"]


@pytest.mark.parametrize(
    "prefix", ["../../evil", "..\\evil", "/etc/x", "", " ", "a/../b", "a\nb", "a\0", "\ud800", "中" * 67]
)
def test_a_name_that_cannot_be_saved_under_is_refused_before_anything_runs(graph: Graph, prefix: str) -> None:
    assert "file name prefix" in str(graph.nodes["Magi2SaveLatent"].validate_inputs(filename_prefix=prefix))


@pytest.mark.parametrize(
    "prefix", ["magi2/latent", "magi2/%year%/clip é 1", "deep\\name", "magi2/", "全角　空白", "👨‍👩‍👧", "中" * 66]
)
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


def test_unloading_after_a_linked_result_runs_again_only_with_that_result(graph: Graph) -> None:
    """A number that each run raises would keep ComfyUI from finding anything after this node in its cache."""
    fingerprint = graph.nodes["Magi2UnloadWorkers"].fingerprint_inputs
    before = fingerprint(what="workers", after=None)
    graph.conditioning()
    assert fingerprint(what="workers", after=None) == before
