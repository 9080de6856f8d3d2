"""Sampling and refining by the engine on one rank: repeatable, seeded, counted; the refiner continues the clip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.magi2_core import engine as engine_module
from magi2_native.magi2_core.engine import Engine
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.tests.miniatures import Encoded, Listener, tiny_engine
from torch import Tensor


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return tiny_engine(tiny)


@pytest.fixture(scope="module")
def latent(engine: Engine, encoded: Encoded) -> dict[str, Tensor]:
    """A finished preview."""
    return engine.run("sample", encoded.sample(), Silent())


def clip(engine: Engine, arguments: dict[str, Any]) -> tuple[bytes, bytes]:
    """Decoded frames and sound as bytes."""
    latent = engine.run("sample", arguments, Silent())
    frames = engine.run("decode_video", {"video": latent["video"]}, Silent())["frames"]
    sound = engine.run("decode_audio", {"audio": latent["audio"]}, Silent())["waveform"]
    assert frames.shape == (125, 32, 64, 3)
    assert sound.shape == (2, 441_000)
    return frames.numpy().tobytes(), sound.numpy().tobytes()


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The noise that each clip started from."""
    kept = []
    original = engine_module.denoise

    def keep(settings: Any, video: Tensor, audio: Tensor, *rest: Any) -> Any:
        kept.append((video.clone(), audio.clone()))
        return original(settings, video, audio, *rest)

    monkeypatch.setattr(engine_module, "denoise", keep)
    return kept


def test_the_same_request_gives_the_same_bytes_and_another_seed_does_not(engine: Engine, encoded: Encoded) -> None:
    first, again, other, back = (clip(engine, encoded.sample(seed=seed)) for seed in (42, 42, 43, 42))
    assert first == again == back
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_text_and_picture_requests_start_from_the_same_noise(
    engine: Engine, encoded: Encoded, noises: list[tuple[Tensor, Tensor]]
) -> None:
    results = [engine.run("sample", encoded.sample(picture=given), Silent()) for given in (False, True)]
    (text_video, text_audio), (picture_video, picture_audio) = noises
    assert torch.equal(text_video, picture_video)
    assert torch.equal(text_audio, picture_audio)
    assert not torch.equal(results[0]["video"], results[1]["video"]), "the picture changes nothing"


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63, 2**64 - 1])
def test_every_seed_draws_video_and_then_audio_from_a_generator_of_its_own(
    engine: Engine, encoded: Encoded, noises: list[tuple[Tensor, Tensor]], seed: int
) -> None:
    engine.run("sample", encoded.sample(seed=seed, steps=1), Silent())
    generator = torch.Generator().manual_seed(seed)
    ((video, audio),) = noises
    assert torch.equal(video, torch.randn(1, 48, 32, 2, 4, generator=generator))
    assert torch.equal(audio, torch.randn(1, 250, 64, generator=generator))


@pytest.mark.parametrize("steps", [1, 3])
def test_n_steps_are_n_forwards_and_n_ticks_that_end_at_the_total(
    engine: Engine, encoded: Encoded, steps: int
) -> None:
    engine.run("load", {"stages": ["preview"]}, Silent())
    forwards: list[int] = []
    hook = engine._loaded["preview"].register_forward_hook(lambda *_: forwards.append(1))
    listener = Listener()
    engine.run("sample", encoded.sample(steps=steps), listener)
    hook.remove()
    assert len(forwards) == steps
    assert listener.ticks == [("sample", done, steps) for done in range(steps + 1)]


def test_the_latents_have_the_shapes_of_ten_seconds(latent: dict[str, Tensor]) -> None:
    assert latent["video"].shape == (48, 32, 2, 4)
    assert latent["audio"].shape == (250, 64)
    assert latent["video"].dtype == latent["audio"].dtype == torch.float32


@pytest.mark.parametrize("option", ["use_negative_prompt", "use_ref_for_uncond"])
def test_the_options_of_the_unconditional_branch_reach_the_model(
    engine: Engine, encoded: Encoded, option: str
) -> None:
    given = encoded.sample(picture=True, steps=1)
    changed = {**given, "guidance": {**given["guidance"], option: False}}
    on, off = (engine.run("sample", arguments, Silent())["video"] for arguments in (given, changed))
    assert not torch.equal(on, off)


def test_refining_doubles_the_frames_and_takes_the_refined_size(
    engine: Engine, encoded: Encoded, latent: dict[str, Tensor]
) -> None:
    listener = Listener()
    before = latent["audio"].clone()
    refined = engine.run("refine", encoded.refine(latent), listener)
    assert refined.keys() == {"video"}, "the sound stays the preview's"
    assert refined["video"].shape == (48, 63, 4, 6)
    assert torch.equal(latent["audio"], before)
    assert [tick for tick in listener.ticks if tick[0] == "refine"] == [("refine", done, 2) for done in range(3)]
    frames = engine.run("decode_video", {"video": refined["video"]}, Silent())["frames"]
    assert frames.shape == (249, 64, 96, 3)


def test_the_refiners_noise_is_the_third_draw_of_the_clips_generator(
    engine: Engine, encoded: Encoded, latent: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []

    def keep(settings: Any, video: Tensor, audio: Tensor, evaluate: Any, draw: Any, events: Any) -> Any:
        drawn.append(draw((1, 48, 63, 4, 6)))
        return video, audio

    monkeypatch.setattr(engine_module, "refine", keep)
    engine.run("refine", encoded.refine(latent, seed=7), Silent())
    generator = torch.Generator().manual_seed(7)
    for shape in ((1, 48, 32, 2, 4), (1, 250, 64)):
        torch.randn(shape, generator=generator)
    assert torch.equal(drawn[0], torch.randn(1, 48, 63, 4, 6, generator=generator))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"steps": 0}, "number of steps is 0"),
        ({"width": 60}, "nearest smaller one is 48x32"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"noise_device": "cuda"}, "made on the CPU"),
        ({"noise_device": "tpu"}, "noise device is 'tpu'"),
        ({"guidance": {"cfg_rescale": float("nan")}}, "cfg_rescale is nan"),
    ],
)
def test_a_bad_request_is_refused_before_the_model_is_read(
    tiny: Path, encoded: Encoded, change: dict[str, Any], sentence: str
) -> None:
    engine = tiny_engine(tiny)
    with pytest.raises(RequestError, match=sentence):
        engine.run("sample", encoded.sample(**change), Silent())
    assert not engine._loaded


@pytest.mark.parametrize(
    "prompt", ["\u26f5\U0001f30a", "\u0642\u0627\u0631\u0628", '{"global_layer": {"context": "A boat"}}', "a " * 500]
)
def test_unusual_prompts_are_encoded(engine: Engine, prompt: str) -> None:
    text = engine.run("encode_text", {"prompt": prompt, "negative_prompt": prompt, "figures": []}, Silent())
    assert text["features"].shape == (text["tokens"], 32)
    assert torch.isfinite(text["features"]).all()
    assert not text["truncated"]


def test_encoding_says_nothing_of_kernels_that_could_be_installed(
    engine: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.integrations import hub_kernels

    hub_kernels.logger.warning_once.cache_clear()
    monkeypatch.setattr(hub_kernels.logging.get_logger("transformers"), "propagate", True)
    engine.run("encode_text", {"prompt": "quiet", "negative_prompt": "", "figures": []}, Silent())
    assert "falling back" not in caplog.text


def test_an_unknown_call_or_stage_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(RequestError, match="no call 'dream'; it has load, release"):
        engine.run("dream", {}, Silent())
    with pytest.raises(RequestError, match="no stage 'vae'; the stages are text_encoder"):
        engine.run("load", {"stages": ["vae"]}, Silent())
