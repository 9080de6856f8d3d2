"""What is on the device: loaded when needed, kept or swapped as the plan says, released when told."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.magi2_core import engine as engine_module
from magi2_native.magi2_core.engine import STAGES, Engine
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.miniatures import PROMPT, SIZE, Encoded, Listener, picture, tiny_engine


def run_everything(engine: Engine, encoded: Encoded) -> list[set[str]]:
    """A clip with everything in it; what was on the device after each call."""
    held = []

    def run(call: str, **arguments: Any) -> Any:
        result = engine.run(call, arguments, Silent())
        held.append(set(engine._loaded))
        return result

    run("encode_text", prompt=PROMPT, negative_prompt="", figures=[])
    run("encode_image", pictures=[picture()], **SIZE)
    latent = run("sample", **encoded.sample(steps=1))
    run("refine", **encoded.refine(latent, steps=1))
    run("decode_audio", audio=latent["audio"])
    run("decode_video", video=latent["video"])
    return held


IN_ORDER = ["text_encoder", "image_encoder", "preview", "refiner", "audio_decoder", "video_decoder"]


def test_swap_holds_one_network_at_a_time(tiny: Path, encoded: Encoded) -> None:
    assert run_everything(tiny_engine(tiny, residency="swap"), encoded) == [{stage} for stage in IN_ORDER]


def test_swap_lets_go_before_the_next_network_is_read(
    tiny: Path, encoded: Encoded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two networks would be on the device for a moment."""
    engine = tiny_engine(tiny, residency="swap")
    engine.run("load", {"stages": ["refiner"]}, Silent())
    first = weakref.ref(engine._loaded["refiner"].block)
    gone, original = [], engine_module.load_module

    def load(*arguments: Any, **options: Any) -> Any:
        gone.append(first() is None)
        return original(*arguments, **options)

    monkeypatch.setattr(engine_module, "load_module", load)
    engine.run("sample", encoded.sample(steps=1), Silent())
    assert gone == [True]


def test_keep_holds_every_network_that_was_used(tiny: Path, encoded: Encoded) -> None:
    held = run_everything(tiny_engine(tiny, residency="keep"), encoded)
    assert held == [set(IN_ORDER[: done + 1]) for done in range(6)]


def test_stages_are_loaded_and_released_by_name(tiny: Path) -> None:
    engine = tiny_engine(tiny, residency="keep")
    engine.run("load", {"stages": STAGES}, Silent())
    assert set(engine._loaded) == set(STAGES)
    engine.run("release", {"stages": ["preview", "refiner"]}, Silent())
    assert set(engine._loaded) == set(STAGES) - {"preview", "refiner"}
    network = weakref.ref(engine._loaded["video_decoder"])
    engine.run("release", {"stages": STAGES}, Silent())
    gc.collect()
    assert not engine._loaded
    assert network() is None, "something still holds a released network"


def test_a_released_network_comes_back_and_gives_the_same(tiny: Path, encoded: Encoded) -> None:
    engine = tiny_engine(tiny)
    first = engine.run("sample", encoded.sample(steps=1), Silent())
    engine.run("release", {"stages": STAGES}, Silent())
    again = engine.run("sample", encoded.sample(steps=1), Silent())
    assert torch.equal(first["video"], again["video"])


def test_encoded_prompts_outlive_a_release(tiny: Path) -> None:
    engine = tiny_engine(tiny, residency="swap")
    arguments = {"prompt": PROMPT, "negative_prompt": "noise", "figures": [1]}
    first = engine.run("encode_text", arguments, Silent())
    engine.run("release", {"stages": STAGES}, Silent())
    listener = Listener()
    again = engine.run("encode_text", arguments, listener)
    assert not listener.ticks, "the layers were read again"
    assert torch.equal(first["features"], again["features"])
    assert torch.equal(first["markers"], again["markers"])


def test_loading_reports_progress_to_the_end(tiny: Path) -> None:
    listener = Listener()
    tiny_engine(tiny).run("load", {"stages": ["preview"]}, listener)
    total = listener.ticks[0][2]
    assert listener.ticks == [("load", done, total) for done in range(1, total + 1)]
    assert listener.checks == total + 1, "one for each tensor, and one where all ranks have read theirs"
