"""Sizes and lengths (20 §1, §6.4)."""

import pytest
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.sampling import geometry


@pytest.mark.parametrize(
    ("resolution", "grid", "rows"), [("272p", (32, 16, 28), 14336), ("540p", (32, 32, 56), 57344)]
)
def test_the_latent_grids_of_the_tiers(resolution: str, grid: tuple[int, int, int], rows: int) -> None:
    got = geometry.latent_grid(*geometry.orient(geometry.tier(resolution).preview, "landscape"))
    assert got == grid
    assert got[0] * got[1] * got[2] == rows


def test_1080p_previews_as_540p_and_names_the_refined_size() -> None:
    tier = geometry.tier("1080p")
    assert tier.preview == geometry.tier("540p").preview
    assert geometry.orient(tier.refined, "portrait") == (1088, 1920)


def test_portrait_exchanges_the_sides() -> None:
    assert geometry.orient(geometry.tier("272p").preview, "portrait") == (256, 448)


def test_ten_seconds_are_32_video_and_250_audio_latents() -> None:
    assert geometry.clip_lengths() == (32, 250)
    assert geometry.decoded_frames(32) == 125
    assert geometry.decoded_frames(63) == 249


@pytest.mark.parametrize("seconds", [0, -1.0, 0.01])
def test_a_clip_without_latents_is_refused(seconds: float) -> None:
    with pytest.raises(RequestError, match="too short"):
        geometry.clip_lengths(seconds)


@pytest.mark.parametrize(("size", "nearest"), [((450, 256), "448x256"), ((448, 260), "448x256"), ((16, 256), "32x256")])
def test_a_size_between_the_steps_is_refused_with_the_nearest_one(size: tuple[int, int], nearest: str) -> None:
    with pytest.raises(RequestError, match=nearest):
        geometry.latent_grid(*size)


@pytest.mark.parametrize("bad", ["480p", "", "1080P"])
def test_an_unknown_resolution_lists_the_known_ones(bad: str) -> None:
    with pytest.raises(RequestError, match="272p, 540p, 1080p"):
        geometry.tier(bad)


def test_an_unknown_orientation_is_refused() -> None:
    with pytest.raises(RequestError, match="landscape, portrait"):
        geometry.orient((448, 256), "square")


@pytest.mark.parametrize(
    ("image", "clip", "size"),
    [
        ((1280, 720), (448, 256), (448, 224)),
        ((720, 1280), (448, 256), (224, 448)),
        ((1280, 720), (256, 448), (448, 224)),  # only the clip's longer side matters
        ((448, 256), (896, 512), (896, 512)),
        ((1024, 768), (896, 512), (896, 672)),
        ((1000, 1000), (896, 512), (896, 896)),
        ((110, 55), (448, 256), (448, 224)),  # dividing first would give 223, and so 192
    ],
)
def test_the_size_of_a_reference_picture(
    image: tuple[int, int], clip: tuple[int, int], size: tuple[int, int]
) -> None:
    assert geometry.reference_size(*image, *clip) == size


@pytest.mark.parametrize("image", [(28, 1), (1, 28), (4000, 100)])
def test_a_picture_too_long_and_narrow_is_refused_with_the_limit(image: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="14:1"):
        geometry.reference_size(*image, 448, 256)


def test_the_limit_follows_the_clip() -> None:
    assert geometry.reference_size(28, 1, 896, 512) == (896, 32)
