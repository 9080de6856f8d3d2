"""The second stage on a real ComfyUI: a clip that goes straight to its file, and what is said of its frames."""

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.tests.comfy_server.client import (
    Prompt,
    cancel,
    files,
    latent_bytes,
    node_of,
    run,
    small_prompt,
    submit,
    wait_for_stage,
)
from magi2_native.tests.comfy_server.page import Page, need_browser, open_page
from magi2_native.tests.comfy_server.server import Server


def large(orientation: str = "landscape", **decode: Any) -> Prompt:
    """The shipped template, small, but decoded as a clip of 1080p is."""
    portrait = orientation == "portrait"
    prompt = small_prompt("preview_to_1080p", seed=5, width=32 if portrait else 64, height=64 if portrait else 32)
    prompt[node_of(prompt, "Magi2Refine")]["inputs"] |= {
        "width": 64 if portrait else 128, "height": 128 if portrait else 64
    }  # fmt: skip
    prompt[node_of(prompt, "Magi2Decode")]["inputs"] |= {"make_frames": "never", **decode}
    return prompt


def tags(clip: Path) -> dict[str, str]:
    import av

    with av.open(str(clip)) as container:
        return dict(container.metadata)


@pytest.mark.parametrize("orientation", ["landscape", "portrait"])
def test_a_refined_clip_is_saved_frame_by_frame_with_all_of_its_sound(comfy: Server, orientation: str) -> None:
    prompt = large(orientation)
    finished = run(comfy, prompt)
    clip = files(comfy, finished)[node_of(prompt, "SaveVideo")]
    facts = read_back(clip)
    assert (facts.width, facts.height) == ((128, 64) if orientation == "landscape" else (64, 128))
    assert (facts.frames, facts.frame_rate, facts.video_seconds) == (249, 25, Fraction(249, 25))
    assert (facts.samples, facts.sample_rate, facts.channels) == (441_000, 44_100, 2)
    assert json.loads(tags(clip)["prompt"]).keys() == prompt.keys(), "the workflow is in the file, as always"
    (text,) = finished.outputs[node_of(prompt, "Magi2Decode")]["text"]
    assert text.startswith("249 frames of")
    written = list((comfy.base / "temp").glob("magi2_*.mp4"))
    assert written
    assert not list((comfy.base / "temp").glob(".magi2-*")), "no unfinished file"


def test_a_delivered_size_and_changed_refiner_options_leave_the_preview_alone(comfy: Server) -> None:
    first = run(comfy, large())
    prompt = large(output_width=96, output_height=54)
    prompt[node_of(prompt, "Magi2Refine")]["inputs"]["noise_value"] = 0
    second = run(comfy, prompt)
    assert {node_of(prompt, "Magi2Sampler"), node_of(prompt, "Magi2EncodePrompt")} <= second.cached
    facts = read_back(files(comfy, second)[node_of(prompt, "SaveVideo")])
    assert (facts.frames, facts.width, facts.height) == (249, 96, 54)
    assert latent_bytes(comfy, first) == latent_bytes(comfy, run(comfy, large()))


@pytest.mark.parametrize("stage", ["refine", "decode_video"])
def test_cancel_in_the_second_stage_is_no_error_and_the_next_run_makes_the_clip(comfy: Server, stage: str) -> None:
    prompt = large(output_width=448, output_height=256)
    prompt[node_of(prompt, "Magi2Sampler")]["inputs"]["seed"] = len(stage)  # nothing is cached
    prompt[node_of(prompt, "Magi2Refine")]["inputs"]["steps"] = 50 if stage == "refine" else 1
    prompt_id = submit(comfy, prompt)
    wait_for_stage(comfy, prompt_id, stage)
    assert cancel(comfy, prompt_id) < 5
    assert not list((comfy.base / "temp").glob(".magi2-*")), "no unfinished file"
    prompt[node_of(prompt, "Magi2Refine")]["inputs"]["steps"] = 1
    facts = read_back(files(comfy, run(comfy, prompt))[node_of(prompt, "SaveVideo")])
    assert (facts.frames, facts.width, facts.height, facts.samples) == (249, 448, 256, 441_000)


# ---- in the page


@pytest.fixture
def page(comfy: Server) -> Iterator[Page]:
    need_browser()
    with open_page(comfy) as page:
        yield page


def test_a_node_that_wants_the_frames_shows_why_there_are_none(page: Page) -> None:
    prompt = large()
    prompt[node_of(prompt, "SaveVideo")]["inputs"]["filename_prefix"] = "video/seen"
    prompt["look"] = {"class_type": "PreviewImage", "inputs": {"images": [node_of(prompt, "Magi2Decode"), 0]}}
    page.listen("execution_success", "execution_error")
    page.run("async (prompt) => { await window.app.api.queuePrompt(0, { output: prompt, workflow: {} }); }", prompt)
    page.wait("() => window.magi2Heard.some(([name]) => name === 'execution_success')", seconds=200)
    (said,) = page.run("() => window.magi2Heard.filter(([name]) => name === 'execution_error').map((e) => e[1])")
    assert said["node_id"] == "look"
    assert "249 frames of 128x64 went straight to the video" in said["exception_message"]
    assert "set make_frames to always" in said["exception_message"]
    assert read_back(page.server.base / "output" / "video" / "seen_00001_.mp4").frames == 249, "the video is saved"
