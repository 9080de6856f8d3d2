"""The procedure of the second stage (50 §9)."""

import math

import pytest
import torch
from magi2_native.magi2_core.errors import NonFiniteError, RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.refiner.stage import (
    RefinerSettings,
    add_noise,
    model_evaluate,
    noise_table,
    refine,
    stretch,
)
from magi2_native.tests.refiner_models import CONFIG, WINDOW, make_refiner
from torch import Tensor

VIDEO = torch.randn(1, 4, 3, 2, 3, generator=torch.Generator().manual_seed(0))
AUDIO = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(1))
SMALL = {"width": 96, "height": 64}


class Recorder(Silent):
    """Stands for the model, the noise and the listener, and remembers in which order they were asked."""

    def __init__(self, cancel_at: int | None = None) -> None:
        self.calls: list[tuple[bool, Tensor, Tensor]] = []
        self.draws: list[tuple[int, ...]] = []
        self.ticks: list[tuple[str, int, int]] = []
        self.checks, self.cancel_at = 0, cancel_at

    def evaluate(self, video: Tensor, audio: Tensor, with_prompt: bool) -> tuple[Tensor, Tensor]:
        self.calls.append((with_prompt, video, audio))
        push = 0.1 if with_prompt else -0.1
        return video * 0.5 + push, audio * 0.5 + push

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        self.draws.append(shape)
        return torch.full(shape, 0.5)

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self.ticks.append((stage, done, total))

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.cancel_at:
            raise KeyboardInterrupt

    def run(self, **settings: float | bool | None) -> tuple[Tensor, Tensor]:
        return refine(RefinerSettings(**SMALL, **settings), VIDEO, AUDIO, self.evaluate, self.draw, self)


def test_the_defaults_are_the_released_settings() -> None:
    settings = RefinerSettings()
    assert (settings.width, settings.height, settings.steps, settings.shift) == (1920, 1088, 5, 5.0)
    assert (settings.noise_value, settings.audio_noise_scale, settings.use_cfg_trick) == (220, -1.0, False)
    assert (settings.video_txt_guidance_scale, settings.audio_txt_guidance_scale) == (2.0, 5.0)
    assert settings.grid(32) == (63, 68, 120)


def test_a_null_shift_is_the_previews() -> None:
    assert RefinerSettings(shift=None).sampling().shift == 7.0
    assert RefinerSettings().sampling().shift == 5.0


def test_the_size_is_floored_to_the_latent_grid() -> None:
    assert RefinerSettings(height=1080).grid(32) == (63, 67, 120)


def test_stretching_keeps_the_corners_and_inserts_the_midpoints_in_time() -> None:
    stretched = stretch(VIDEO, (5, 4, 7))
    assert stretched.shape == (1, 4, 5, 4, 7)
    for corner in ((0, 0, 0), (-1, -1, -1), (0, -1, 0)):
        assert torch.allclose(stretched[0, :, *corner], VIDEO[0, :, *corner], atol=1e-6)
    assert torch.allclose(stretched[:, :, 1, 0, 0], (VIDEO[:, :, 0, 0, 0] + VIDEO[:, :, 1, 0, 0]) / 2, atol=1e-6)


def test_the_noise_table_runs_from_nearly_clean_to_nothing_left() -> None:
    table = noise_table()
    assert table.dtype == torch.float32
    assert len(table) == 1000
    assert table[0] == pytest.approx(math.sqrt(1 - 0.00085), abs=1e-6)
    assert table[-1] == 0
    assert table[220] == pytest.approx(0.8389104, abs=2e-7)
    assert (table.diff() < 0).all()


def test_noise_is_mixed_in_with_its_variance_preserved() -> None:
    s = noise_table()[220].item()
    got = add_noise(VIDEO, 220, lambda shape: torch.ones(shape))
    assert torch.allclose(got, s * VIDEO + 0.5442696, atol=1e-6)


def test_level_zero_adds_no_noise_and_draws_none() -> None:
    recorder = Recorder()
    recorder.run(noise_value=0)
    assert recorder.draws == []
    assert torch.equal(recorder.calls[0][1], stretch(VIDEO, (5, 4, 6)))


def test_each_step_asks_with_the_prompt_then_without() -> None:
    recorder = Recorder()
    video, audio = recorder.run()
    assert [with_prompt for with_prompt, _, _ in recorder.calls] == [True, False] * 5
    assert recorder.ticks == [("refine", step, 5) for step in range(1, 6)]
    assert recorder.checks == 10
    assert video.shape == (1, 4, 5, 4, 6)
    assert recorder.draws == [(1, 4, 5, 4, 6)]
    assert audio.shape == (1, 0, 6)


def test_guidance_moves_away_from_the_negative_prompt() -> None:
    """The stand-in's branches differ by 0.2 everywhere, so one step to clean moves by sigma times 0.2 for each unit."""
    results = {g: Recorder().run(steps=1, video_txt_guidance_scale=g)[0] for g in (1.0, 2.0, 4.0)}
    assert torch.allclose(results[1.0] - results[2.0], torch.tensor(0.2), atol=1e-3)
    assert torch.allclose(results[2.0] - results[4.0], torch.tensor(0.4), atol=1e-3)


def test_without_guidance_only_the_negative_prompt_is_asked_and_its_sound_velocity_kept() -> None:
    recorder = Recorder()
    _, audio = recorder.run(video_txt_guidance_scale=0.0, audio_noise_scale=0.4, steps=1)
    assert [with_prompt for with_prompt, _, _ in recorder.calls] == [False]
    start = recorder.calls[0][2]
    assert torch.allclose(audio, start - 0.9998 * (start * 0.5 - 0.1), atol=1e-3)


def test_the_frame_trick_counts_refined_frames() -> None:
    plain, trick = Recorder(), Recorder()
    usual, _ = plain.run(steps=1, video_txt_guidance_scale=4.0)
    lowered, _ = trick.run(
        steps=1, video_txt_guidance_scale=4.0, use_cfg_trick=True, cfg_trick_start_frame=3, cfg_trick_value=1.0
    )
    assert torch.allclose((lowered - usual)[:, :, :3], torch.tensor(0.6), atol=1e-3)
    assert torch.equal(lowered[:, :, 3:], usual[:, :, 3:])


def test_a_trick_value_above_zero_keeps_both_branches_when_the_rest_is_unguided() -> None:
    recorder = Recorder()
    recorder.run(video_txt_guidance_scale=0.0, use_cfg_trick=True, cfg_trick_value=-1.0, steps=1)
    assert len(recorder.calls) == 2


@pytest.mark.parametrize("scale", [0.0, 0.4])
def test_sound_that_is_shown(scale: float) -> None:
    recorder = Recorder()
    _, audio = recorder.run(audio_noise_scale=scale, steps=3)
    first = scale * 0.5 + (1 - scale) * AUDIO
    assert torch.allclose(recorder.calls[0][2], first)
    assert recorder.draws == [(1, 4, 5, 4, 6)] + [(1, 5, 6)] * (scale > 0)  # the video's noise comes first
    if scale == 0:  # shown, never stepped
        assert all(torch.equal(shown, AUDIO) for _, _, shown in recorder.calls)
        assert torch.equal(audio, AUDIO)
    else:
        assert not torch.allclose(recorder.calls[2][2], first)


def test_cancelling_is_possible_between_the_two_forwards_of_a_step() -> None:
    recorder = Recorder(cancel_at=4)
    with pytest.raises(KeyboardInterrupt):
        recorder.run()
    assert len(recorder.calls) == 3


def test_a_velocity_that_is_not_finite_stops_at_its_step() -> None:
    recorder = Recorder()

    def broken(video: Tensor, audio: Tensor, with_prompt: bool) -> tuple[Tensor, Tensor]:
        pair = recorder.evaluate(video, audio, with_prompt)
        return (pair[0] * math.nan, pair[1]) if len(recorder.calls) == 4 else pair

    with pytest.raises(NonFiniteError, match="at step 2"):
        refine(RefinerSettings(**SMALL), VIDEO, AUDIO, broken, recorder.draw, recorder)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"noise_value": 1000}, "noise_value"),
        ({"noise_value": -1}, "noise_value"),
        ({"audio_noise_scale": math.nan}, "audio_noise_scale"),
        ({"height": 8}, "size"),
        ({"steps": 0}, "steps"),
        ({"shift": 0.0}, "shift"),
        ({"video_txt_guidance_scale": math.inf}, "video_txt_guidance_scale"),
        ({"cfg_trick_start_frame": -2}, "cfg_trick_start_frame"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_by_name(bad: dict[str, float], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        RefinerSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("sound", [-1.0, 0.4])
def test_a_transformer_refines_a_clip_with_texts_of_different_lengths(sound: float) -> None:
    """The released form and the one with sound, on a real transformer; equal seeds give equal clips."""
    model = make_refiner()
    generator = torch.Generator().manual_seed(3)
    video = torch.randn(1, CONFIG.video_in_channels, 2, 3, 4, generator=generator)
    audio = torch.randn(1, 7, CONFIG.audio_in_channels, generator=generator)
    prompt, negative = (torch.randn(n, CONFIG.text_in_channels, generator=generator) for n in (6, 0))
    settings = RefinerSettings(width=96, height=64, steps=2, audio_noise_scale=sound)

    def once() -> tuple[Tensor, Tensor]:
        noise = torch.Generator().manual_seed(4)
        evaluate = model_evaluate(model, settings, 2, 7, prompt, negative, Silent(), window=WINDOW)
        return refine(settings, video, audio, evaluate, lambda shape: torch.randn(shape, generator=noise), Silent())

    refined, heard = once()
    assert refined.shape == (1, 12, 3, 4, 6)
    assert heard.shape == (1, 7 if sound >= 0 else 0, 16)
    assert torch.isfinite(refined).all()
    assert torch.equal(once()[0], refined)
