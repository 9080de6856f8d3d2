"""The scale between codec and sampler (40 §2)."""

import torch
from magi2_native.magi2_core.codecs.latent_scale import (
    LATENT_MEAN,
    LATENT_STD,
    denormalise,
    from_wan_scale,
    normalise,
    to_wan_scale,
)

MEAN = torch.tensor(LATENT_MEAN).view(1, 48, 1, 1, 1)
STD = torch.tensor(LATENT_STD).view(1, 48, 1, 1, 1)


def latent(dtype: torch.dtype = torch.float32, T: int = 3) -> torch.Tensor:
    return torch.randn(1, 48, T, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_the_inverse_of_std_is_taken_in_fp32():
    in_double = (latent() - MEAN) * (1.0 / torch.tensor(LATENT_STD, dtype=torch.float64)).float().view_as(STD)
    assert torch.equal(normalise(latent()), (latent() - MEAN) * (1.0 / STD))
    assert not torch.equal(normalise(latent()), in_double), "14 of the 48 inverses must differ by one ulp"


def test_decoding_divides_by_the_inverse_instead_of_multiplying_by_std():
    assert torch.equal(denormalise(latent()), latent() / (1.0 / STD) + MEAN)
    assert not torch.equal(denormalise(latent()), latent() * STD + MEAN)


def test_bfloat16_latents_are_rescaled_in_fp32_and_rounded_once():
    z = latent(torch.bfloat16)
    expected = (z.float() / (1.0 / STD) + MEAN).to(torch.bfloat16)
    assert denormalise(z).dtype == torch.bfloat16
    assert torch.equal(denormalise(z), expected)
    in_bfloat16 = z / (1.0 / STD).to(torch.bfloat16) + MEAN.to(torch.bfloat16)
    assert not torch.equal(denormalise(z), in_bfloat16)


def test_core_latents_are_z_times_std_plus_mean_and_come_back():
    z = latent()
    assert torch.equal(to_wan_scale(z), z * STD + MEAN)
    assert torch.allclose(from_wan_scale(to_wan_scale(z)), z, atol=1e-6)
    assert from_wan_scale(to_wan_scale(latent(torch.float16))).dtype == torch.float32


def test_a_latent_without_a_time_axis_is_scaled_by_channel_too():
    z = latent(T=1)
    assert torch.equal(to_wan_scale(z[:, :, 0]), to_wan_scale(z)[:, :, 0])
