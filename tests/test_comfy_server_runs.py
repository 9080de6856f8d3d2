"""Clips on a real ComfyUI server with two workers and a miniature (60 §13, layer 3)."""

import json
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from magi2_native.magi2_core.checkpoint.miniature import MiniatureSize, write_miniature
from magi2_native.magi2_core.codecs.media import MediaFacts, read_back
from magi2_native.tests.comfy_server.client import (
    cancel,
    clip_of,
    files,
    latent_bytes,
    node_of,
    run,
    small_prompt,
    submit,
    wait,
    wait_for_stage,
)
from magi2_native.tests.comfy_server.server import PACK, PACK_FOLDER, Server
from safetensors.torch import load_file

TEMPLATES = sorted(path.stem for path in (PACK / "workflows").glob("*.json"))


@pytest.fixture(autouse=True)
def empty_queue(comfy: Server) -> Iterator[None]:
    """Nothing that one test left running reaches the next."""
    yield
    comfy.request("/queue", {"clear": True})
    comfy.request("/interrupt", {})


def check_clip(facts: MediaFacts, frames: int, width: int, height: int, rate: float) -> None:
    assert (facts.frames, facts.width, facts.height) == (frames, width, height)
    assert facts.frame_rate == rate
    assert facts.video_seconds == Fraction(frames) / Fraction(rate)
    assert (facts.sample_rate, facts.channels) == (44_100, 2)
    assert (facts.samples, facts.audio_seconds) == (441_000, 10)


def test_the_pack_loads_without_complaint_and_offers_all_its_nodes(comfy: Server) -> None:
    starting = comfy.log.split("To see the GUI go to")[0]  # other tests may have used this server already
    lines = [line for line in starting.splitlines() if PACK_FOLDER in line]
    assert len(lines) == 1, "one line at import: ComfyUI's own"
    assert "IMPORT FAILED" not in comfy.log
    assert float(lines[0].split("seconds")[0]) <= 1.0
    offered = set(comfy.get("/object_info"))
    documented = {path.stem for path in (PACK / "web" / "docs").glob("Magi2*.md")}
    assert {name for name in offered if name.startswith("Magi2")} == documented


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_is_accepted_as_it_is(comfy: Server, template: str) -> None:
    prompt = json.loads((PACK / "workflows" / "api" / f"{template}.json").read_text(encoding="utf-8"))
    status, answer = comfy.request("/prompt", {"prompt": prompt, "front": True})
    comfy.request("/queue", {"delete": [answer.get("prompt_id")]})
    comfy.request("/interrupt", {"prompt_id": answer.get("prompt_id")})
    assert status == 200, answer
    assert answer["node_errors"] == {}


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_makes_a_clip_with_exact_frames_and_sound(comfy: Server, template: str) -> None:
    prompt = small_prompt(template)
    finished = run(comfy, prompt)
    video = files(comfy, finished)[node_of(prompt, "SaveVideo")]
    check_clip(read_back(video), *clip_of(prompt))


def test_a_picture_and_another_seed_change_the_clip_and_the_first_seed_brings_it_back(comfy: Server) -> None:
    first = run(comfy, small_prompt(seed=1))
    other = run(comfy, small_prompt(seed=2))
    encoder, loader = node_of(small_prompt(), "Magi2EncodePrompt"), node_of(small_prompt(), "Magi2LoadCheckpoint")
    assert {encoder, loader} <= other.cached, "a changed seed does not touch the text encoder"
    again = run(comfy, small_prompt(seed=1))
    assert latent_bytes(comfy, first) != latent_bytes(comfy, other)
    assert latent_bytes(comfy, first) == latent_bytes(comfy, again)
    save = node_of(small_prompt(), "SaveVideo")
    assert different(files(comfy, first)[save], files(comfy, again)[save]) == [[], []]
    picture = run(comfy, small_prompt("picture_to_clip", seed=1))
    assert latent_bytes(comfy, picture) != latent_bytes(comfy, first)


def decoded(path: Path) -> tuple[list[bytes], list[bytes]]:
    """All frames and all pieces of sound of a clip."""
    import av

    with av.open(str(path)) as container:
        frames = [frame.to_ndarray().tobytes() for frame in container.decode(video=0)]
    with av.open(str(path)) as container:
        sound = [frame.to_ndarray().tobytes() for frame in container.decode(audio=0)]
    return frames, sound


def different(first: Path, second: Path) -> list[list[int]]:
    """The numbers of the frames, and of the pieces of sound, in which two clips differ."""
    pairs = zip(decoded(first), decoded(second), strict=True)
    return [[i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b] for pair in pairs]


def test_the_same_prompt_again_runs_nothing(comfy: Server) -> None:
    run(comfy, small_prompt(seed=3))
    again = run(comfy, small_prompt(seed=3))
    assert again.cached == set(small_prompt())


def test_two_queued_prompts_run_one_after_the_other(comfy: Server) -> None:
    ids = [submit(comfy, small_prompt(seed=seed, steps=3)) for seed in (11, 12)]
    first, second = (wait(comfy, prompt_id) for prompt_id in ids)
    assert (first.status, second.status) == ("success", "success")
    end, start = (run.messages[name]["timestamp"] for run, name in ((first, "execution_success"),
                                                                   (second, "execution_start")))  # fmt: skip
    assert end <= start
    assert latent_bytes(comfy, second) == latent_bytes(comfy, run(comfy, small_prompt(seed=12, steps=3)))


# what makes each phase last long enough to be caught in it
LONG = {
    "starting": {},
    "encode_text": {"prompt": "a very long story about foxes " * 900},
    "sample": {"steps": 300},
    "decode_video": {"width": 224, "height": 128, "steps": 1},
}


@pytest.mark.parametrize("phase", LONG)
def test_cancel_stops_in_two_seconds_without_an_error_and_the_next_run_is_right(
    comfy: Server, undisturbed: bytes, phase: str
) -> None:
    if phase == "starting":
        comfy.request("/magi2/stop", {})
    prompt = small_prompt(seed=100 + len(phase), **LONG[phase])  # type: ignore[arg-type]
    prompt_id = submit(comfy, prompt)
    wait_for_stage(comfy, prompt_id, phase)
    took = cancel(comfy, prompt_id)
    # decoding is asked between windows, and one window of this size takes seconds on a busy CPU
    assert took < (20 if phase == "decode_video" else 5), f"{took:.1f} s"
    assert latent_bytes(comfy, run(comfy, small_prompt(seed=77))) == undisturbed


def test_cancel_while_weights_are_loaded_stops_at_once_and_the_next_run_is_right(
    comfy: Server, undisturbed: bytes
) -> None:
    # half a gigabyte, read as bfloat16 and cast: long enough to be caught in it
    size = MiniatureSize(hidden_size=768, layers=6, experts=64, expert_width=256, refiner_layers=1)
    write_miniature(comfy.base / "models" / "magi2" / "large", size=size)
    prompt = small_prompt(seed=5)
    prompt[node_of(prompt, "Magi2LoadCheckpoint")]["inputs"] |= {"checkpoint": "large", "dtype": "float32"}
    prompt_id = submit(comfy, prompt)
    wait_for_stage(comfy, prompt_id, "load")
    assert cancel(comfy, prompt_id) < 5
    assert latent_bytes(comfy, run(comfy, small_prompt(seed=77))) == undisturbed


def test_cancel_while_the_clip_is_saved_leaves_no_file_and_the_next_run_saves_it(comfy: Server) -> None:
    prompt = small_prompt(seed=6, width=224, height=128, steps=1)
    run(comfy, prompt)
    save, folder = node_of(prompt, "SaveVideo"), comfy.base / "output" / "video"
    prompt[save]["inputs"]["filename_prefix"] = "video/cancelled"
    prompt_id = submit(comfy, prompt)
    deadline = time.monotonic() + 20
    while not list(folder.glob(".magi2-*.part")):
        assert time.monotonic() < deadline, "the clip was not seen while it was written"
    assert cancel(comfy, prompt_id) < 5
    assert list(folder.glob(".magi2-*")) + list(folder.glob("cancelled*")) == []
    check_clip(read_back(files(comfy, run(comfy, prompt))[save]), *clip_of(prompt))


@pytest.fixture(scope="module")
def undisturbed(comfy: Server) -> bytes:
    """The latents of a run that nothing disturbed."""
    return latent_bytes(comfy, run(comfy, small_prompt(seed=77)))


def test_a_killed_worker_is_named_and_the_next_run_is_right(comfy: Server, undisturbed: bytes) -> None:
    prompt_id = submit(comfy, small_prompt(seed=21, steps=300))
    wait_for_stage(comfy, prompt_id, "sample")
    victim = comfy.workers()[-1]
    victim.kill()
    finished = wait(comfy, prompt_id, 30)
    assert finished.status == "error"
    assert "SIGKILL" in finished.error
    assert "rank" in finished.error.lower()
    assert latent_bytes(comfy, run(comfy, small_prompt(seed=77))) == undisturbed


@pytest.mark.parametrize("flags", [{"unload_models": True}, {"unload_models": True, "free_memory": True}])
def test_free_ends_the_workers_and_the_next_run_is_right(
    comfy: Server, undisturbed: bytes, flags: dict[str, bool]
) -> None:
    run(comfy, small_prompt(seed=31))
    assert len(comfy.workers()) >= 2
    comfy.request("/free", flags)
    deadline = time.monotonic() + 20
    while comfy.workers() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert comfy.workers() == []
    assert latent_bytes(comfy, run(comfy, small_prompt(seed=77))) == undisturbed


def test_a_core_node_takes_the_split_latent_and_the_joined_one_makes_a_clip(comfy: Server) -> None:
    prompt = small_prompt(seed=77)
    sampler = node_of(prompt, "Magi2Sampler")
    prompt["split"] = {"class_type": "Magi2SplitLatent", "inputs": {"magi2_latent": [sampler, 0]}}
    prompt["core"] = {"class_type": "SaveLatent", "inputs": {"samples": ["split", 0], "filename_prefix": "core"}}
    prompt["join"] = {"class_type": "Magi2JoinLatent", "inputs": {"latent": ["split", 0], "sound_from": [sampler, 0]}}
    decode = node_of(prompt, "Magi2Decode")
    prompt[decode]["inputs"]["latent"] = ["join", 0]
    found = files(comfy, run(comfy, prompt))
    assert load_file(found["core"])["latent_tensor"].shape == (1, 48, 32, 2, 4)
    check_clip(read_back(found[node_of(prompt, "SaveVideo")]), *clip_of(prompt))


def test_a_saved_latent_loads_and_decodes_to_the_same_clip(comfy: Server) -> None:
    prompt = small_prompt(seed=77)
    first = run(comfy, prompt)
    name = files(comfy, first)["latent"].relative_to(comfy.base / "output").as_posix()
    decode, save = node_of(prompt, "Magi2Decode"), node_of(prompt, "SaveVideo")
    loader = node_of(prompt, "Magi2LoadCheckpoint")
    second = run(comfy, {
        loader: prompt[loader],
        "load": {"class_type": "Magi2LoadLatent", "inputs": {"latent": name}},
        decode: {"class_type": "Magi2Decode", "inputs": {"model": [loader, 0], "latent": ["load", 0]}},
        save: prompt[save],
    })  # fmt: skip
    assert different(files(comfy, second)[save], files(comfy, first)[save]) == [[], []]


@pytest.mark.parametrize(
    ("node", "name", "value", "words"),
    [
        ("Magi2LoadCheckpoint", "checkpoint", "nowhere", "Found there: MAGI-2-Preview"),
        ("Magi2LoadCheckpoint", "devices", "gpu0", "not a device"),
        ("Magi2EncodePrompt", "prompt", "  ", "prompt is empty"),
        ("Magi2Sampler", "resolution", "4k", "272p, 540p"),
        ("Magi2Sampler", "steps", 0, "smaller than min of 1"),
        ("Magi2Sampler", "video_guidance", 101.0, "bigger than max of 100"),
        ("Magi2Sampler", "seed", -1, "smaller than min of 0"),
        ("Magi2Decode", "parts", "smell", "video only"),
    ],
)
def test_bad_inputs_are_refused_in_a_sentence_before_anything_runs(
    comfy: Server, node: str, name: str, value: object, words: str
) -> None:
    prompt = small_prompt()
    prompt.pop("latent")
    prompt[node_of(prompt, node)]["inputs"][name] = value
    status, answer = comfy.request("/prompt", {"prompt": prompt})
    assert status == 400, answer
    (errors,) = (entry["errors"] for entry in answer["node_errors"].values() if entry["class_type"] == node)
    assert words in json.dumps(errors, ensure_ascii=False)


def test_the_queue_command_brings_the_clip_home(comfy: Server, tmp_path: Path) -> None:
    from magi2_native.headless.queue import queue_workflow
    from magi2_native.magi2_core.events import Silent

    workflow = small_prompt("picture_to_clip", seed=91)
    (tmp_path / "fox.png").write_bytes((comfy.base / "input" / "example.png").read_bytes())
    workflow[node_of(workflow, "LoadImage")]["inputs"]["image"] = "fox.png"
    steps: list[tuple[str, int, int]] = []

    class Watching(Silent):
        def progress(self, stage: str, done: int, total: int, latent: object = None) -> None:
            steps.append((stage, done, total))

    written = queue_workflow(workflow, comfy.url, tmp_path / "out", Watching(), files_near=tmp_path)
    (clip,) = (path for path in written if path.suffix == ".mp4")
    facts = read_back(clip)
    assert (facts.frames, facts.audio_seconds) == (125, 10.0)
    assert ("MAGI-2 Sampler", 2, 2) in steps
