"""The loop from noise to latents (20 §5.4, §10)."""

import pytest
import torch
from magi2_native.magi2_core.errors import NonFiniteError, RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.sampling.denoise import SamplingSettings, denoise
from magi2_native.magi2_core.sampling.guidance import GuidanceSettings
from torch import Tensor

VIDEO, AUDIO = torch.full((1, 4, 3, 2, 2), 2.0), torch.full((1, 5, 6), -1.0)


class Recorder(Silent):
    """Events that remember, and that cancel at a given check."""

    def __init__(self, cancel_at: int | None = None) -> None:
        self.ticks: list[tuple[str, int, int]] = []
        self.previews: list[Tensor | None] = []
        self.checks, self.cancel_at = 0, cancel_at

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self.ticks.append((stage, done, total))
        self.previews.append(latent)

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.cancel_at:
            raise KeyboardInterrupt


class Model:
    """Both branches see data of 0.5 at every noise level; counts its calls."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
        self.times.append(time)
        return tuple(((x - 0.5) / max(time, 1e-3)).repeat(2, *[1] * (x.ndim - 1)) for x in (video, audio))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_n_steps_are_n_forwards_and_n_ticks(steps: int) -> None:
    model, events = Model(), Recorder()
    denoise(SamplingSettings(steps=steps), VIDEO, AUDIO, model, events)
    assert len(model.times) == steps
    assert events.ticks == [("sample", k + 1, steps) for k in range(steps)]
    assert events.checks == steps


def test_the_loop_reaches_the_data_and_leaves_the_noise_alone() -> None:
    noise = (VIDEO.clone(), AUDIO.clone())
    video, audio = denoise(SamplingSettings(steps=8), *noise, Model(), Silent())
    assert torch.allclose(video, torch.tensor(0.5), atol=2e-2)
    assert torch.allclose(audio, torch.tensor(0.5), atol=2e-2)
    assert torch.equal(noise[0], VIDEO)
    assert torch.equal(noise[1], AUDIO)


def test_the_preview_is_the_estimate_of_the_clean_video() -> None:
    events = Recorder()
    video, _ = denoise(SamplingSettings(steps=3), VIDEO, AUDIO, Model(), events)
    assert [p.shape for p in events.previews] == [(4, 3, 2, 2)] * 3
    assert torch.allclose(events.previews[0], torch.tensor(0.5), atol=1e-2)
    assert torch.equal(events.previews[-1], video[0])


def test_each_modality_has_its_own_scale() -> None:
    def model(video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
        return (torch.stack([torch.ones_like(x[0]), torch.zeros_like(x[0])]) for x in (video, audio))

    guidance = GuidanceSettings(video_txt_guidance_scale=2.0, audio_txt_guidance_scale=3.0)
    settings = SamplingSettings(steps=1, guidance=guidance)
    video, audio = denoise(settings, torch.zeros_like(VIDEO), torch.zeros_like(AUDIO), model, Silent())
    assert torch.allclose(video, torch.tensor(-2.0), atol=1e-3)
    assert torch.allclose(audio, torch.tensor(-3.0), atol=1e-3)


def test_a_modality_without_elements_is_left_as_it_is() -> None:
    empty = torch.zeros(1, 0, 6)
    video, audio = denoise(SamplingSettings(steps=2), VIDEO, empty, Model(), Silent())
    assert audio is empty
    assert not torch.equal(video, VIDEO)


def test_cancelling_passes_through_between_two_forwards() -> None:
    model = Model()
    with pytest.raises(KeyboardInterrupt):
        denoise(SamplingSettings(steps=5), VIDEO, AUDIO, model, Recorder(cancel_at=3))
    assert len(model.times) == 2


@pytest.mark.parametrize("modality", ["video", "audio"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_stops_the_loop_at_its_step(modality: str, value: float) -> None:
    healthy, events = Model(), Recorder()

    def model(video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
        pair = healthy(video, audio, time)
        if len(healthy.times) == 2:
            pair[modality == "audio"].view(-1)[3] = value
        return pair

    with pytest.raises(NonFiniteError, match=f"non-finite latent at step 2: the {modality} latent"):
        denoise(SamplingSettings(steps=5), VIDEO, AUDIO, model, events)
    assert [done for _, done, _ in events.ticks] == [1]


def test_the_shipped_settings() -> None:
    settings = SamplingSettings()
    assert (settings.steps, settings.shift) == (100, 7.0)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"shift": -1.0}])
def test_settings_that_cannot_be_used_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        SamplingSettings(**bad)  # type: ignore[arg-type]


def test_the_skimming_uses_the_latent_from_before_the_step() -> None:
    """20 §5.4: with the latent of after the step the sign tests, and so the result, would differ."""
    seen: list[Tensor] = []
    generator = torch.Generator().manual_seed(2)
    pair = torch.randn(2, 4, 3, 2, 2, generator=generator)

    def model(video: Tensor, audio: Tensor, time: float) -> tuple[Tensor, Tensor]:
        seen.append(video)
        return pair, torch.zeros(2, 5, 6)

    from magi2_native.magi2_core.sampling.guidance import guide_pair
    from magi2_native.magi2_core.sampling.schedule import make_schedule

    guidance = GuidanceSettings(use_skimmed_cfg_linear=True)
    start = torch.randn(1, 4, 3, 2, 2, generator=generator)
    video, _ = denoise(SamplingSettings(1, 7.0, guidance), start, AUDIO, model, Silent())
    sigma = make_schedule(1, 7.0).sigmas[0]
    assert torch.equal(video, start - sigma * guide_pair(pair, torch.tensor([5.0]), start, guidance))
