"""Guidance and its options (20 §5)."""

import math

import pytest
import torch
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.sampling.guidance import (
    GuidanceSettings,
    combine,
    cut_scale,
    frame_scale,
    guide_pair,
    rescale,
    skim,
)
from torch import Tensor

CPU = torch.device("cpu")


def random_pair(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(seed))


def test_the_defaults_are_the_shipped_values() -> None:
    settings = GuidanceSettings()
    assert (settings.video_txt_guidance_scale, settings.audio_txt_guidance_scale) == (5.0, 7.0)
    assert settings.use_negative_prompt
    assert settings.use_ref_for_uncond
    assert not settings.use_cfg_trick
    assert not settings.use_dynamic_cfg
    assert not settings.use_skimmed_cfg_linear
    assert settings.cfg_rescale == 0.0


def test_the_guided_velocity_is_the_unconditional_one_plus_the_scaled_difference() -> None:
    c, u = random_pair(3, 4)
    assert torch.equal(combine(c, u, 5.0), u + 5.0 * (c - u))


def test_a_scale_of_zero_is_the_unconditional_velocity() -> None:
    pair = random_pair(4, 5, 2, 3)
    assert torch.equal(guide_pair(pair, 0.0, torch.zeros(1), GuidanceSettings()), pair[1:])


def test_an_integer_scale_becomes_a_float() -> None:
    scale = frame_scale(GuidanceSettings(video_txt_guidance_scale=5), 4, CPU)
    assert scale.dtype == torch.float32
    assert scale.shape == (1,)


def test_the_frame_trick_lowers_the_first_frames_only() -> None:
    settings = GuidanceSettings(use_cfg_trick=True, cfg_trick_start_frame=2, cfg_trick_value=1.5)
    assert frame_scale(settings, 4, CPU).flatten().tolist() == [1.5, 1.5, 5.0, 5.0]


def test_the_frame_trick_never_raises_the_scale_and_may_cover_the_clip() -> None:
    settings = GuidanceSettings(use_cfg_trick=True, cfg_trick_start_frame=99, cfg_trick_value=9.0)
    assert frame_scale(settings, 3, CPU).flatten().tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize(("timestep", "scale"), [(501, 5.0), (500, 5.0), (499, 2.0)])
def test_the_dynamic_cutoff_applies_strictly_below_its_timestep(timestep: int, scale: float) -> None:
    settings = GuidanceSettings(use_dynamic_cfg=True)
    assert cut_scale(torch.tensor([5.0]), settings, timestep).item() == scale


def test_the_dynamic_cutoff_leaves_lower_frames_alone() -> None:
    settings = GuidanceSettings(
        use_dynamic_cfg=True, use_cfg_trick=True, cfg_trick_start_frame=1, cfg_trick_value=1.0
    )
    assert cut_scale(frame_scale(settings, 3, CPU), settings, 0).flatten().tolist() == [1.0, 2.0, 2.0]


def test_skimming_does_nothing_at_a_scale_of_one_or_against_silence() -> None:
    c, u = random_pair(40, seed=3)
    x = torch.randn(40)
    assert skim(c, u, 1.0, x, 3.0) is u
    nothing = torch.zeros(40)
    assert skim(c, nothing, 5.0, x, 3.0) is nothing


def test_skimming_is_the_two_passes_of_the_definition() -> None:
    """Element by element, as 20 §5.2 writes it."""
    c, u = random_pair(200, seed=4)
    x, g = torch.randn(200, generator=torch.Generator().manual_seed(5)), 5.0
    w = (3.0 - 1) / (g - 1)

    def mask(a: float, b: float, at: float) -> bool:
        den = at - ((at - b) + g * ((at - a) - (at - b)))
        sign = math.copysign
        return sign(1, a - b) == sign(1, a) == sign(1, a * g - b * (g - 1)) and sign(1, den) == sign(1, den - at)

    expected = []
    for a, b, at in zip(c.tolist(), u.tolist(), x.tolist(), strict=True):
        first = a * (1 - w) + b * w if mask(a, b, at) else b
        expected.append(a * (1 - w) + first * w if mask(first, a, at) else first)
    got = skim(c, u, g, x, 3.0)
    assert torch.allclose(got, torch.tensor(expected), atol=1e-6)
    assert 0 < (got != u).sum() < 200


def test_full_rescaling_gives_each_channel_the_conditional_spread() -> None:
    c, guided = random_pair(1, 4, 3, 5, 2)
    assert torch.allclose(rescale(guided, c, 1.0).std(dim=(2, 3, 4)), c.std(dim=(2, 3, 4)), atol=1e-5)


def test_rescaling_sound_works_over_its_length() -> None:
    c, guided = random_pair(1, 50, 6)
    assert torch.allclose(rescale(guided, c, 1.0).std(dim=1), c.std(dim=1), atol=1e-5)


def test_rescaling_a_constant_channel_stays_finite() -> None:
    for length in (1, 5):
        assert torch.isfinite(rescale(torch.ones(1, length, 2), torch.randn(1, length, 2), 0.7)).all()


@pytest.mark.parametrize(
    "bad",
    [
        {"video_txt_guidance_scale": math.nan},
        {"audio_txt_guidance_scale": math.inf},
        {"cfg_trick_value": math.inf},
        {"cfg_trick_start_frame": -1},
        {"cfg_trick_start_frame": 1.5},
        {"dynamic_cfg_start_t": 1001},
        {"dynamic_cfg_cutoff_value": math.nan},
        {"skimmed_cfg_scale": -0.1},
        {"cfg_rescale": -1.0},
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        GuidanceSettings(**bad)  # type: ignore[arg-type]
