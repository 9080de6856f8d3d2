"""The Turbo decoder network and its configuration (40 §4.1 to §4.4)."""

import math

import pytest
import torch
import torch.nn.functional as F
from magi2_native.magi2_core.codecs.turbo_decoder import (
    Conv3d,
    ResBlock,
    TurboConfig,
    Upsample,
    rms_norm,
    turbo_decoder_tensors,
    unpatchify,
)
from magi2_native.magi2_core.errors import CheckpointError
from magi2_native.tests.codec_networks import RELEASED_TURBO, seeded, turbo


def activations(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * scale


def test_the_released_decoder_has_the_published_tensors():
    table = turbo_decoder_tensors(TurboConfig())
    assert (len(table), sum(math.prod(spec.shape) for spec in table.values())) == (80, 107_122_892)
    assert table["conv_in.conv.weight"].shape == (512, 48, 3, 3, 3)
    assert table["up_blocks.0.upsamplers.0.time_conv.conv.weight"].shape == (1024, 512, 3, 1, 1)
    assert table["up_blocks.2.upsamplers.0.resample.1.weight"].shape == (128, 128, 3, 3)
    assert table["conv_out.conv.weight"].shape == (12, 64, 3, 3, 3)
    assert {spec.dtype for spec in table.values()} == {torch.bfloat16}


def test_the_released_json_gives_the_released_architecture():
    config = TurboConfig.from_json(RELEASED_TURBO)
    assert config == TurboConfig()
    assert (config.spatial_ratio, config.temporal_ratio) == (16, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_causal", True),
        ("decoder_is_dw_conv", [False, False, True, False, False]),
        ("use_unpatchify", False),
        ("patch_size", 4),
        ("patch_size_t", 2),
        ("out_channels", 4),
        ("decoder_layers_per_block", [2, 2, 2, 3]),
        ("decoder_spatio_temporal_scaling", [True, True, True]),
        ("decoder_spatio_only", [False]),
        ("spatial_compression_ratio", 8),
        ("temporal_compression_ratio", 8),
        ("step_size", 0),
    ],
)
def test_a_configuration_that_the_decoder_has_not_is_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=key):
        TurboConfig.from_json(RELEASED_TURBO | {key: value})


@pytest.mark.parametrize(
    "key",
    ["latent_channels", "decoder_block_out_channels", "decoder_layers_per_block", "decoder_spatio_temporal_scaling",
     "first_chunk_size", "step_size"],
)  # fmt: skip
def test_a_missing_key_that_shapes_the_result_is_named(key):
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        TurboConfig.from_json({name: value for name, value in RELEASED_TURBO.items() if name != key})


def test_keys_with_a_harmless_default_may_be_missing():
    optional = ("decoder_causal", "decoder_is_dw_conv", "resnet_norm_eps", "patch_size_t", "in_channels",
                "spatial_compression_ratio", "temporal_compression_ratio")  # fmt: skip
    assert TurboConfig.from_json({k: v for k, v in RELEASED_TURBO.items() if k not in optional}) == TurboConfig()


def test_time_is_padded_by_repeating_the_end_frames_and_space_by_zeros():
    conv = Conv3d(1, 1, 3)
    conv.conv.weight.data.fill_(1.0)
    conv.conv.bias.data.fill_(0.0)
    x = torch.tensor([1.0, 10.0, 100.0]).view(1, 1, 3, 1, 1).expand(1, 1, 3, 3, 3)
    y = conv(conv.padded(x))
    assert y[0, 0, :, 1, 1].tolist() == [9 * 12, 9 * 111, 9 * 210]
    assert y[0, 0, 0, 0, 0] == 4 * 12  # a corner meets four of the nine places


def test_norm_statistics_of_bfloat16_are_fp32_and_the_product_is_rounded_once():
    x = activations(1, 64, 3, 5).to(torch.bfloat16)
    exact = x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-8)
    assert torch.equal(rms_norm(x, 1e-8), exact.to(torch.bfloat16))
    in_bfloat16 = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)
    assert not torch.equal(rms_norm(x, 1e-8), in_bfloat16)


def test_the_norm_is_rounded_before_the_activation():
    block, x = seeded(ResBlock(6, 6, F.silu, 1e-6)).to(torch.bfloat16), activations(1, 6, 2, 4, 4).to(torch.bfloat16)
    given = []
    block.conv1.conv.register_forward_pre_hook(lambda _module, inputs: given.append(inputs[0]))
    block(x)
    rounded_twice = F.silu(rms_norm(x, 1e-8))
    x32 = x.float()
    rounded_once = F.silu(x32 * torch.rsqrt(x32.square().mean(1, keepdim=True) + 1e-8)).to(torch.bfloat16)
    assert torch.equal(given[0][:, :, 1:-1], rounded_twice)
    assert not torch.equal(rounded_twice, rounded_once)


def test_the_shortcut_is_normed_with_its_own_epsilon():
    x = activations(1, 6, 2, 4, 4, scale=1e-3)  # small enough for 1e-6 to matter beside the mean square
    results = []
    for eps in (1e-6, 1e-8):
        block = seeded(ResBlock(6, 4, F.silu, eps))
        for conv in (block.conv1, block.conv2):
            conv.conv.weight.data.zero_()
            conv.conv.bias.data.zero_()
        results.append(block(x))
        x64 = x.double()
        normed = (x64 * torch.rsqrt(x64.square().mean(1, keepdim=True) + eps)).float()
        shortcut = block.conv_shortcut.conv
        assert torch.allclose(results[-1], F.conv3d(normed, shortcut.weight, shortcut.bias), atol=1e-6)
    assert not torch.allclose(*results, atol=1e-2)


def test_the_main_path_is_normed_with_the_small_epsilon():
    block, x = seeded(ResBlock(6, 6, F.silu, 1e-6)), activations(1, 6, 2, 4, 4, scale=1e-3)
    given = []
    block.conv1.conv.register_forward_pre_hook(lambda _module, inputs: given.append(inputs[0]))
    block(x)
    x64 = x.double()
    normed = F.silu(x64 * torch.rsqrt(x64.square().mean(1, keepdim=True) + 1e-8)).float()
    assert torch.allclose(given[0][:, :, 1:-1], normed, atol=1e-6)


def test_res_blocks_after_an_upsampler_begin_with_relu_and_all_others_with_silu():
    decoder = turbo(TurboConfig(block_out_channels=(4, 6, 8, 8), layers_per_block=(2, 1, 1, 1, 2)))
    assert [r.first for r in decoder.mid_block.resnets] == [F.silu] * 2
    firsts = [[r.first for r in block.resnets] for block in decoder.up_blocks]
    assert firsts == [[F.relu], [F.relu], [F.relu], [F.silu] * 2]
    assert [b.conv_in.first for b in decoder.up_blocks if hasattr(b, "conv_in")] == [F.silu] * 2


def upsampler() -> Upsample:
    """Time halves x and x + 100, and a spatial convolution that changes nothing."""
    up = Upsample(1, time=True)
    up.time_conv.conv.weight.data = torch.tensor([0.0, 1.0, 0.0]).view(1, 1, 3, 1, 1).repeat(2, 1, 1, 1, 1)
    up.time_conv.conv.bias.data = torch.tensor([0.0, 100.0])
    up.conv.weight.data = F.pad(torch.ones(1, 1, 1, 1), (1, 1, 1, 1))
    up.conv.bias.data = torch.zeros(1)
    return up


def test_the_two_halves_of_the_channels_interleave_in_time():
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1, 1)
    assert upsampler()(x, False)[0, 0, :, 0, 0].tolist() == [1, 101, 2, 102, 3, 103]


def test_the_first_window_loses_its_first_frame_at_each_time_upsampling():
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1, 1)
    assert upsampler()(x, True)[0, 0, :, 0, 0].tolist() == [101, 2, 102, 3, 103]


def test_space_is_enlarged_by_repeating_the_nearest():
    x = torch.arange(4.0).view(1, 1, 1, 2, 2)
    assert upsampler()(x, False)[0, 0, 0].tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


def test_four_channels_become_a_square_column_by_column():
    x = torch.arange(4.0).repeat(3).view(1, 12, 1, 1, 1)
    assert unpatchify(x)[0, 0, 0].tolist() == [[0, 2], [1, 3]]


@pytest.mark.parametrize("first", [True, False])
def test_every_convolution_is_given_frames_whose_channels_come_last(first, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    decoder, layouts = turbo(dtype=torch.bfloat16), {}
    formats = {torch.nn.Conv2d: torch.channels_last, torch.nn.Conv3d: torch.channels_last_3d}
    convolutions = [module for module in decoder.modules() if type(module) in formats]
    for module in convolutions:
        module.register_forward_pre_hook(
            lambda conv, given: layouts.update({conv: given[0].is_contiguous(memory_format=formats[type(conv)])})
        )
    with torch.inference_mode():
        decoder(activations(1, 48, 3, 2, 3).to(torch.bfloat16), first)
    assert layouts == dict.fromkeys(convolutions, True)


def test_a_processor_without_bfloat16_decodes_the_same(monkeypatch):
    decoder, z = turbo(dtype=torch.bfloat16), activations(1, 48, 3, 2, 3).to(torch.bfloat16)
    convolved = []
    for conv in (decoder.conv_in.conv, decoder.up_blocks[0].upsamplers[0].conv):
        conv.register_forward_hook(lambda *_: convolved.append(1))
    with torch.inference_mode():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        expected = decoder(z, True).float()
        native = len(convolved)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
        got = decoder(z, True).float()
    assert native == len(convolved) == 1 + 5, "the slow convolution must not run"
    assert (got - expected).norm() < 0.02 * expected.norm()  # single roundings of bfloat16, at 2^-8, go either way


@pytest.mark.parametrize(("first", "frames"), [(True, 4 * 3 - 3), (False, 4 * 3)])
def test_a_window_of_n_latents_gives_4n_frames_or_three_less(first, frames):
    with torch.inference_mode():
        assert turbo()(activations(1, 48, 3, 2, 3), first).shape == (1, 3, frames, 32, 48)
