"""The initial noise (20 §2)."""

from functools import partial

import pytest
import torch
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.sampling.noise import check_noise_device, clip_noise, draw_noise, noise_generator

GRID = (3, 2, 2)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**63, 2**64 - 1])
def test_every_seed_of_64_bits_is_a_seed(seed: int) -> None:
    video, audio = clip_noise(partial(draw_noise, generator=noise_generator(seed)), GRID, 5)
    again, _ = clip_noise(partial(draw_noise, generator=noise_generator(seed)), GRID, 5)
    assert torch.equal(video, again)
    assert (video.shape, audio.shape) == ((1, 48, 3, 2, 2), (1, 5, 64))
    assert video.dtype == audio.dtype == torch.float32


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "1"])
def test_other_seeds_are_refused(seed: object) -> None:
    with pytest.raises(RequestError, match="seed"):
        noise_generator(seed)  # type: ignore[arg-type]


def test_video_is_drawn_before_audio() -> None:
    generator = noise_generator(42)
    video, audio = clip_noise(partial(draw_noise, generator=generator), GRID, 5)
    other = torch.Generator().manual_seed(42)
    assert torch.equal(video, torch.randn(1, 48, *GRID, generator=other))
    assert torch.equal(audio, torch.randn(1, 5, 64, generator=other))


def test_later_stages_go_on_from_the_same_generator() -> None:
    generator = noise_generator(42)
    clip_noise(partial(draw_noise, generator=generator), GRID, 5)
    later = draw_noise((1, 48, 5, 4, 4), generator)
    assert not torch.equal(later, draw_noise((1, 48, 5, 4, 4), noise_generator(42)))


def test_the_shared_generator_of_torch_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    clip_noise(partial(draw_noise, generator=noise_generator(7)), GRID, 5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_unknown_noise_device_is_refused() -> None:
    with pytest.raises(RequestError, match="noise device"):
        check_noise_device("tpu", "cpu")


def test_noise_of_a_gpu_is_refused_for_a_clip_made_without_one() -> None:
    with pytest.raises(RequestError, match="choose 'cpu'"):
        check_noise_device("cuda", "cpu")
    check_noise_device("cuda", "cuda")
