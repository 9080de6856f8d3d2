"""On a real server: what is wrong with a checkpoint is told before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from magi2_native.tests.comfy_server.client import Prompt, node_of, small_prompt, submit, wait
from magi2_native.tests.comfy_server.server import Server
from magi2_native.tests.comfy_stub.fixtures import write_checkpoint


def refusal(server: Server, prompt: Prompt, checkpoint: str) -> tuple[str, set[str]]:
    """The error of a prompt, and the classes of the nodes that had been executed by then."""
    prompt[node_of(prompt, "Magi2LoadCheckpoint")]["inputs"]["checkpoint"] = checkpoint
    finished = wait(server, submit(server, prompt))
    assert finished.status == "error"
    executed = finished.messages["execution_error"]["executed"]
    return finished.error, {prompt[node]["class_type"] for node in executed}


@pytest.fixture
def folder(comfy: Server, request: pytest.FixtureRequest) -> Path:
    """A folder of the server's for a checkpoint that the test damages."""
    return comfy.base / "models" / "magi2" / request.node.name


def test_a_damaged_checkpoint_fails_in_its_loader(comfy: Server, folder: Path) -> None:
    write_checkpoint(folder, without=("turbo_vae",))
    shard = folder / "preview" / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    text, executed = refusal(comfy, small_prompt(), folder.name)
    assert "cannot be loaded: 2 problems" in text
    assert str(shard) in text
    assert str(folder / "turbo_vae") in text
    assert executed <= {"Magi2SamplerOptions"}


def test_a_missing_refiner_is_noticed_before_the_preview_is_made(comfy: Server, folder: Path) -> None:
    write_checkpoint(folder)
    prompt = small_prompt("preview_to_1080p")
    # ComfyUI makes first what can be saved first: where the preview is saved, a failure later loses nothing
    for saved in [key for key, node in prompt.items() if node["class_type"] == "Magi2SaveLatent"]:
        del prompt[saved]
    text, executed = refusal(comfy, prompt, folder.name)
    assert str(folder / "refiner") in text
    assert "Magi2Sampler" not in executed
