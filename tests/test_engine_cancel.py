"""Cancel in every stage: it stops at the next check point, leaves nothing, and the next run is undisturbed (80 line 1).

ComfyUI's interrupt is an Exception in some versions and a BaseException in others; neither may be swallowed.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.headless.session import PoolSession
from magi2_native.magi2_core.engine import Engine
from magi2_native.magi2_core.errors import NonFiniteError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.miniatures import PROMPT, SIZE, Encoded, Listener, picture, tiny_engine, tiny_plan

Result = dict[str, Any]
# the network of each call: it is loaded before, so that a cancel falls into the work itself
NETWORKS = {
    "encode_text": "text_encoder", "encode_image": "image_encoder", "sample": "preview", "refine": "refiner",
    "decode_audio": "audio_decoder", "decode_video": "video_decoder", "write_clip": "video_decoder",
}  # fmt: skip
CALLS = ("load", "encode_text", "encode_image", "sample", "refine", "decode_audio", "decode_video", "write_clip")


class InterruptError(Exception):
    """As ComfyUI 0.3.64 raises it."""


class Stop(BaseException):
    """As later versions raise it."""


@pytest.fixture(scope="module")
def arguments(tiny: Path, encoded: Encoded, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every call that can be cancelled, with what it is given."""
    latent = tiny_engine(tiny).run("sample", encoded.sample(steps=1), Silent())
    output = tmp_path_factory.mktemp("clips") / "clip.mp4"
    return {
        "load": {"stages": ["preview", "refiner"]},
        "encode_text": {"prompt": PROMPT + " Cancelled.", "negative_prompt": "noise", "figures": []},
        "encode_image": {"pictures": [picture(), picture().flip(0)], **SIZE},
        "sample": encoded.sample(),
        "refine": encoded.refine(latent),
        "decode_audio": {"audio": latent["audio"]},
        "decode_video": {"video": latent["video"]},
        "write_clip": {
            "video": latent["video"], "waveform": torch.rand(2, 441_000), "sample_rate": 44_100, "crf": 10,
            "fps": "25/2", "path": str(output),
        },
    }  # fmt: skip


def outcome(call: str, result: Result, arguments: dict[str, Result]) -> dict[str, Any]:
    """What a call made, its tensors and its file as hashes; the file is taken away."""
    made = {name: digest(value) if isinstance(value, torch.Tensor) else value for name, value in result.items()}
    if call == "write_clip":
        path = Path(arguments[call]["path"])
        made["file"] = hashlib.sha256(path.read_bytes()).hexdigest()
        path.unlink()
    return made


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def leftovers(arguments: dict[str, Result]) -> list[Path]:
    return list(Path(arguments["write_clip"]["path"]).parent.iterdir())


def load_for(engine: Engine, call: str) -> None:
    engine.run("load", {"stages": [NETWORKS[call]] if call in NETWORKS else []}, Silent())


@pytest.fixture
def engine(tiny: Path) -> Engine:
    return tiny_engine(tiny, residency="swap")


@pytest.fixture(scope="module")
def undisturbed(tiny: Path, arguments: dict[str, Result]) -> Callable[[str], tuple[dict[str, Any], int]]:
    """What a call gives when nobody cancels, and how many check points it passes; each is run once."""

    @cache
    def run(call: str) -> tuple[dict[str, Any], int]:
        listener, engine = Listener(), tiny_engine(tiny, residency="swap")
        load_for(engine, call)
        result = engine.run(call, arguments[call], listener)
        return outcome(call, result, arguments), listener.checks

    return run


@pytest.mark.parametrize("kind", [InterruptError, Stop])
@pytest.mark.parametrize("call", CALLS)
def test_cancel_stops_a_call_and_leaves_nothing(
    engine: Engine, arguments: dict[str, Result], undisturbed: Callable[[str], Any], call: str, kind: Any
) -> None:
    expected, checks = undisturbed(call)
    assert checks > 1, "there is nothing between the beginning and the end at which it could stop"
    listener = Listener(interrupt=kind("cancelled"), at_check=checks - 1)
    load_for(engine, call)
    with pytest.raises(kind) as caught:
        engine.run(call, arguments[call], listener)
    assert caught.value is listener.interrupt
    assert listener.checks == checks - 1
    assert not leftovers(arguments)
    assert outcome(call, engine.run(call, arguments[call], Silent()), arguments) == expected


def test_a_cancelled_load_leaves_no_half_loaded_network(engine: Engine) -> None:
    with pytest.raises(InterruptError):
        engine.run("load", {"stages": ["preview"]}, Listener(interrupt=InterruptError(), at_check=5))
    assert not engine._loaded


def test_sampling_can_stop_between_the_layers_of_a_step(engine: Engine, encoded: Encoded) -> None:
    """A step of the real model may take minutes."""
    engine.run("load", {"stages": ["preview"]}, Silent())
    listener = Listener()
    engine.run("sample", encoded.sample(steps=1), listener)
    assert listener.checks >= engine.config.num_layers


# ---- on two ranks


@pytest.fixture(scope="module")
def session(tiny: Path) -> Iterator[PoolSession]:
    """Two workers that hold one network at a time."""
    with PoolSession(tiny_plan(tiny, "sp2", residency="swap")) as session:
        yield session


def workers(session: PoolSession) -> list[int]:
    return [rank["pid"] for replica in session._pool.status()["replicas"] for rank in replica["ranks"]]


STAGE = {"write_clip": "decode_video"}


@pytest.mark.parametrize("call", CALLS)
def test_cancel_on_two_ranks_keeps_the_workers_and_the_next_run_is_undisturbed(
    session: PoolSession, arguments: dict[str, Result], call: str
) -> None:
    kind = InterruptError if CALLS.index(call) % 2 else Stop
    session.run("release", {"stages": []}, Silent())
    before = workers(session)
    assert len(before) == 2
    listener = Listener(interrupt=kind("cancelled"), at_stage=STAGE.get(call, call))
    with pytest.raises(kind) as caught:
        session.run(call, arguments[call], listener)
    assert caught.value is listener.interrupt
    assert not leftovers(arguments)
    first, second = (outcome(call, session.run(call, arguments[call], Silent()), arguments) for _ in range(2))
    assert first == second
    assert workers(session) == before


def test_a_long_sampling_stops_within_two_seconds(session: PoolSession, encoded: Encoded) -> None:
    session.run("sample", encoded.sample(steps=1), Silent())
    listener = Listener(interrupt=InterruptError(), at_stage="sample")
    started = time.monotonic()
    with pytest.raises(InterruptError):
        session.run("sample", encoded.sample(steps=1000), listener)
    assert time.monotonic() - started < 4
    assert len(listener.ticks) == 1


def test_a_long_decode_stops_within_a_window_and_leaves_no_file(
    session: PoolSession, arguments: dict[str, Result]
) -> None:
    longer = {**arguments["write_clip"], "video": torch.randn(48, 90, 4, 8)}
    with pytest.raises(Stop):
        session.run("write_clip", longer, Listener(interrupt=Stop(), at_stage="decode_video"))
    assert not leftovers(arguments)


def test_alternating_prompts_and_clips_while_swapping_keep_the_ranks_together(
    session: PoolSession, encoded: Encoded, caplog: pytest.LogCaptureFixture
) -> None:
    """The prompt is read on one rank; the model that it displaces there comes back on both."""
    before = workers(session)
    clips = []
    for number in range(2):
        text = {"prompt": f"{PROMPT} {number}", "negative_prompt": "", "figures": []}
        session.run("encode_text", text, Silent())
        clips.append(session.run("sample", encoded.sample(steps=1), Silent()))
        session.run("decode_audio", {"audio": clips[-1]["audio"]}, Silent())
        clips.append(session.run("sample", encoded.sample(steps=1), Silent()))
    assert all(torch.equal(clip["video"], clips[0]["video"]) for clip in clips)
    assert workers(session) == before
    assert "different numbers of check points" not in caplog.text


def test_a_non_finite_latent_on_the_workers_arrives_as_itself(session: PoolSession, encoded: Encoded) -> None:
    before = workers(session)
    broken = encoded.sample(features=torch.full_like(encoded.features, float("nan")))
    with pytest.raises(NonFiniteError, match=r"^non-finite latent at step 1: the video latent"):
        session.run("sample", broken, Silent())
    assert torch.isfinite(session.run("sample", encoded.sample(steps=1), Silent())["video"]).all()
    assert workers(session) == before
