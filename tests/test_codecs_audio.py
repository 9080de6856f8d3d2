"""The audio decoder and the resampling to real time (40 §5)."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from magi2_native.magi2_core.codecs.oobleck_decoder import (
    Conv,
    OobleckConfig,
    Snake,
    Upsample,
    oobleck_decoder_tensors,
)
from magi2_native.magi2_core.codecs.resample import resample, to_real_time
from magi2_native.magi2_core.errors import CheckpointError, RequestError
from magi2_native.tests.codec_networks import oobleck, seeded

CODEC = {
    "encoder": {"type": "oobleck", "config": {"in_channels": 2, "channels": 128, "latent_dim": 128}},
    "decoder": {
        "type": "oobleck",
        "config": {
            "out_channels": 2, "channels": 128, "c_mults": [1, 2, 4, 8, 16], "strides": [2, 4, 4, 8, 8],
            "latent_dim": 64, "use_snake": True, "final_tanh": False,
        },
    },
    "bottleneck": {"type": "vae"}, "latent_dim": 64, "downsampling_ratio": 2048, "io_channels": 2,
}  # fmt: skip
RELEASED = {
    "model_type": "diffusion_cond", "sample_rate": 44100,
    "model": {"pretransform": {"type": "autoencoder", "iterate_batch": True, "config": CODEC}},
}  # fmt: skip


def changed(*path_and_value) -> dict:
    """The released JSON with one value inside the codec replaced, or removed where the value is `del`."""
    *path, last, value = path_and_value
    values = copy.deepcopy(RELEASED)
    place = values["model"]["pretransform"]["config"]
    for key in path:
        place = place[key]
    if value == "del":
        del place[last]
    else:
        place[last] = value
    return values


def test_the_released_decoder_has_the_published_tensors():
    table = oobleck_decoder_tensors(OobleckConfig())
    assert len(table) == 182
    assert sum(math.prod(spec.shape) for spec in table.values()) == 78_122_626
    assert table["layers.1.layers.1.weight_v"].shape == (2048, 1024, 16)
    assert table["layers.1.layers.1.weight_g"].shape == (2048, 1, 1)
    assert "layers.7.bias" not in table


def test_the_released_json_gives_the_released_architecture():
    assert OobleckConfig.from_json(RELEASED) == OobleckConfig()


def test_a_json_of_the_codec_alone_is_read_too():
    alone = {"model_type": "autoencoder", "sample_rate": 44100, "model": CODEC}
    assert OobleckConfig.from_json(alone) == OobleckConfig()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (changed("decoder", "config", "final_tanh", True), "final_tanh is True"),
        (changed("decoder", "config", "final_tanh", "del"), "final_tanh is True"),  # absent means true
        (changed("decoder", "config", "soft_clip", True), "soft_clip is True"),
        (changed("decoder", "config", "use_nearest_upsample", True), "use_nearest_upsample is True"),
        (changed("decoder", "config", "use_snake", False), "use_snake is False"),
        (changed("decoder", "type", "dac"), "decoder.type is 'dac'"),
        (changed("bottleneck", "type", "rvq"), "bottleneck.type is 'rvq'"),
        (changed("downsampling_ratio", 1024), "downsampling_ratio is 1024, but its strides multiply to 2048"),
        (changed("decoder", "config", "strides", [2, 4, 4, 64]), "4 strides for 5 c_mults"),
        (changed("decoder", "config", "strides", "del"), "lacks strides"),
        ({**RELEASED, "model": {"pretransform": {"type": "wavelet"}}}, "type is 'wavelet'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_codec_is_refused(values, said):
    with pytest.raises(CheckpointError, match=said):
        OobleckConfig.from_json(values)


def test_odd_strides_are_refused():
    values = changed("decoder", "config", "strides", [1, 4, 8, 8, 8])
    with pytest.raises(CheckpointError, match="stride of 1"):
        OobleckConfig.from_json(values)


def test_the_weight_norm_is_over_all_dimensions_but_the_first():
    conv = seeded(Conv(3, 5, 7))
    expected = torch._weight_norm(conv.weight_v, conv.weight_g, 0)
    conv.fold()
    assert torch.allclose(conv.weight, expected, atol=1e-7)


def test_the_weight_norm_of_a_transposed_convolution_is_for_each_input_channel():
    conv = seeded(Upsample(3, 5, 4))
    v, g = conv.weight_v.clone(), conv.weight_g.clone()
    conv.fold()
    for i in range(3):
        assert torch.allclose(conv.weight[i].norm(), g[i].abs().squeeze(), atol=1e-6)
        assert torch.allclose(conv.weight[i] / conv.weight[i].norm(), g[i].sign() * v[i] / v[i].norm(), atol=1e-6)


def test_folding_leaves_one_weight_and_no_norm():
    decoder = oobleck()
    names = set(decoder.state_dict())
    decoder.fold()
    left = set(decoder.state_dict())
    assert left == {n.replace("weight_g", "weight") for n in names if not n.endswith("weight_v")}


def test_snake_reads_its_parameters_as_logarithms():
    snake = Snake(2)
    snake.alpha.data, snake.beta.data = torch.tensor([0.0, 1.0]), torch.tensor([0.5, -0.5])
    x = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(0))
    alpha, beta = snake.alpha.exp().view(2, 1), snake.beta.exp().view(2, 1)
    assert torch.allclose(snake(x), x + torch.sin(alpha * x) ** 2 / (beta + 1e-9), atol=1e-6)


@pytest.mark.parametrize("latents", [1, 3])
def test_each_latent_becomes_2048_samples(latents):
    decoder = oobleck()
    decoder.fold()
    assert decoder(torch.randn(1, 64, latents)).shape == (1, 2, 2048 * latents)


def test_the_waveform_is_not_limited():
    decoder = oobleck()
    decoder.fold()
    z = torch.randn(1, 64, 1, generator=torch.Generator().manual_seed(0))
    wave = decoder(z)
    decoder.layers[-1].weight.mul_(10 / wave.abs().max())
    assert decoder(z).abs().max() == pytest.approx(10, rel=1e-4)


@pytest.mark.parametrize(
    ("n", "m"),
    [(512, 441), (601, 517), (600, 516), (601, 516), (7, 10), (6, 10), (6, 9), (10, 10), (9, 9), (2, 1), (1, 5)],
)
def test_resampling_equals_scipy(n, m):
    scipy_signal = pytest.importorskip("scipy.signal", reason="scipy is among the development requirements")
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(n))
    expected = torch.from_numpy(scipy_signal.resample(x.numpy(), m, axis=-1))
    assert torch.allclose(resample(x, m), expected, atol=2e-6)


def tone(hertz: float, samples: int, rate: int) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz * torch.arange(samples, dtype=torch.float64) / rate).float()


def test_ten_seconds_become_441000_samples():
    got = to_real_time(torch.stack([tone(440, 512000, 51200), tone(30, 512000, 51200)]))
    assert torch.allclose(got, torch.stack([tone(440, 441000, 44100), tone(30, 441000, 44100)]), atol=1e-5)


def test_frequencies_above_half_of_44100_are_cut():
    assert to_real_time(tone(24000, 5120, 51200)).abs().max() < 1e-5
    assert to_real_time(tone(20000, 5120, 51200)).abs().max() > 0.9


def test_resampling_takes_the_whole_signal_as_one_period():
    wave = F.pad(torch.ones(1), (1, 510))
    assert to_real_time(wave)[-1].abs() > 1e-3, "content at the start must reach round to the end"


def test_empty_sound_is_refused():
    with pytest.raises(RequestError, match="0 samples"):
        to_real_time(torch.zeros(2, 0))
