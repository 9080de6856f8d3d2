"""What a test does with a running server: queue, watch, interrupt, read the history."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .server import PACK, Server

Prompt = dict[str, dict[str, Any]]


@dataclass
class Run:
    """A finished prompt."""

    status: str
    messages: dict[str, Any]
    outputs: dict[str, Any]

    @property
    def cached(self) -> set[str]:
        """Ids of the nodes that did not run because nothing had changed."""
        return set(self.messages.get("execution_cached", {}).get("nodes", []))

    @property
    def error(self) -> str:
        return str(self.messages.get("execution_error", {}).get("exception_message", ""))

    @property
    def interrupted(self) -> bool:
        return "execution_interrupted" in self.messages


def small_prompt(template: str = "text_to_clip", *, steps: int = 2, seed: int = 42, width: int = 64, height: int = 32,
                 prompt: str | None = None) -> Prompt:  # fmt: skip
    """A shipped API template, made small enough for a miniature on a CPU, with its latents saved as node 'latent'."""
    made: Prompt = json.loads((PACK / "workflows" / "api" / f"{template}.json").read_text(encoding="utf-8"))
    sampler = node_of(made, "Magi2Sampler")
    made["options"] = {"class_type": "Magi2SamplerOptions",
                       "inputs": {"width": width, "height": height, **OPTIONS}}  # fmt: skip
    made[sampler]["inputs"] |= {"steps": steps, "seed": seed, "options": ["options", 0]}
    made["latent"] = {"class_type": "Magi2SaveLatent",
                      "inputs": {"magi2_latent": [sampler, 0], "filename_prefix": "magi2/test"}}  # fmt: skip
    if prompt is not None:
        made[node_of(made, "Magi2EncodePrompt")]["inputs"]["prompt"] = prompt
    for node in made.values():
        # a run to the end, without a language model and without 1920x1080 pixels
        node["inputs"] |= SMALL.get(node["class_type"], {})
    return made


SMALL = {
    "Magi2EnhancePrompt": {"on_failure": "original"},
    "Magi2Caption": {"stop_to_edit": False},
    "Magi2Refine": {"width": 128, "height": 64, "steps": 2},
    "Magi2Decode": {"output_width": 0, "output_height": 0},
}


def clip_of(prompt: Prompt) -> tuple[int, int, int, float]:
    """Frames, width, height and frame rate of the clip that a small prompt makes."""
    classes = {node["class_type"]: node["inputs"] for node in prompt.values()}
    if (refine := classes.get("Magi2Refine")) is not None:
        return 249, refine["width"], refine["height"], 25.0
    return 125, prompt["options"]["inputs"]["width"], prompt["options"]["inputs"]["height"], 12.5


OPTIONS = {
    "noise_device": "cpu",
    "use_ref_for_uncond": True,
    "use_cfg_trick": False,
    "cfg_trick_start_frame": 13,
    "cfg_trick_value": 2.0,
    "use_dynamic_cfg": False,
    "dynamic_cfg_start_t": 500,
    "dynamic_cfg_cutoff_value": 2.0,
    "use_skimmed_cfg_linear": False,
    "skimmed_cfg_scale": 3.0,
    "cfg_rescale": 0.0,
}


def node_of(prompt: Prompt, class_type: str) -> str:
    (found,) = (node_id for node_id, node in prompt.items() if node["class_type"] == class_type)
    return found


def submit(server: Server, prompt: Prompt) -> str:
    """Queue a prompt that the server must accept whole."""
    status, answer = server.request("/prompt", {"prompt": prompt, "client_id": uuid.uuid4().hex})
    assert status == 200, answer
    assert answer["node_errors"] == {}
    return str(answer["prompt_id"])


def wait(server: Server, prompt_id: str, seconds: float = 240) -> Run:
    """Wait for the end of a prompt."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log[-3000:]
        entry = server.get(f"/history/{prompt_id}").get(prompt_id)
        if entry is not None:
            return Run(entry["status"]["status_str"], dict(entry["status"]["messages"]), entry["outputs"])
        time.sleep(0.1)
    raise AssertionError(f"prompt {prompt_id} did not end in {seconds:g} s: {server.get('/magi2/status')}")


def run(server: Server, prompt: Prompt) -> Run:
    """Queue a prompt, and return it when it has succeeded."""
    finished = wait(server, submit(server, prompt))
    assert finished.status == "success", finished.error
    return finished


def cancel(server: Server, prompt_id: str) -> float:
    """Interrupt a prompt, which must end without an error; the seconds until it has ended."""
    pressed = time.monotonic()
    server.request("/interrupt", {})
    finished = wait(server, prompt_id)
    assert finished.interrupted, finished.error or finished.status
    assert "execution_error" not in finished.messages
    return time.monotonic() - pressed


def wait_for_stage(server: Server, prompt_id: str, stage: str, seconds: float = 120) -> None:
    """Wait until the workers are in a stage of a prompt: 'starting', or a stage's name with a unit of it done."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = server.get("/magi2/status")
        progress = status["progress"] or {}
        if status["state"] == stage or (progress.get("stage") == stage and progress.get("total")):
            return
        ended = server.get(f"/history/{prompt_id}").get(prompt_id)
        assert ended is None, f"{stage} was not reached: {ended['status']}"
        time.sleep(0.02)
    raise AssertionError(f"{stage} was not reached: {server.get('/magi2/status')}")


def files(server: Server, finished: Run) -> dict[str, Path]:
    """The files that a run saved, by the id of the node."""
    found = {}
    for node_id, output in finished.outputs.items():
        for kind in ("images", "latents"):
            for entry in output.get(kind, []):
                found[node_id] = server.base / "output" / entry["subfolder"] / entry["filename"]
    return found


def latent_bytes(server: Server, finished: Run) -> bytes:
    """Video and sound latents of a run, as bytes to compare."""
    from safetensors.torch import load_file

    tensors = load_file(files(server, finished)["latent"])
    return b"".join(tensors[name].numpy().tobytes() for name in ("video", "audio"))
