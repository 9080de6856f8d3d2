"""The picture encoder (40 §3)."""

import math

import pytest
import torch
import torch.nn.functional as F
from magi2_native.magi2_core.codecs.latent_scale import normalise
from magi2_native.magi2_core.codecs.wan_encoder import (
    CausalConv3d,
    WanEncoder,
    WanEncoderConfig,
    average_shortcut,
    encode_picture,
    patchify,
    wan_encoder_tensors,
)
from magi2_native.magi2_core.errors import CheckpointError, RequestError
from magi2_native.magi2_core.precision import true_fp32
from magi2_native.tests.codec_networks import seeded, wan


def video(T: int, H: int = 32, W: int = 48) -> torch.Tensor:
    return torch.rand(1, 3, T, H, W, generator=torch.Generator().manual_seed(2)) * 2 - 1


def test_the_released_encoder_has_the_published_tensors():
    table = wan_encoder_tensors(WanEncoderConfig())
    trunk = {name: spec for name, spec in table.items() if name.startswith("encoder.")}
    assert (len(trunk), sum(math.prod(spec.shape) for spec in trunk.values())) == (84, 149_627_776)
    rest = {name: spec.shape for name, spec in table.items() if name not in trunk}
    assert rest == {"conv1.weight": (96, 96, 1, 1, 1), "conv1.bias": (96,)}
    assert {spec.dtype for spec in table.values()} == {torch.float32}


def test_a_single_frame_meets_the_last_slice_of_each_kernel():
    conv, x = seeded(CausalConv3d(3, 5, 3)), video(1)
    assert torch.allclose(conv(x), F.conv3d(F.pad(x, (1, 1, 1, 1, 2, 0)), conv.weight, conv.bias), atol=1e-6)


def test_a_causal_convolution_never_sees_a_later_frame():
    conv, x = seeded(CausalConv3d(3, 5, 3)), video(4)
    later = x.clone()
    later[:, :, 2:] += 1
    assert torch.equal(conv(x)[:, :, :2], conv(later)[:, :, :2])
    assert not torch.equal(conv(x)[:, :, 2], conv(later)[:, :, 2])


def test_the_first_latent_of_a_video_is_that_of_its_first_frame():
    encoder = wan()
    assert torch.allclose(encoder(video(5))[:, :, :1], encoder(video(5)[:, :, :1]), atol=1e-5)


def test_frames_that_fill_no_chunk_are_dropped():
    encoder = wan()
    assert encoder(video(9)).shape[2] == 3
    assert torch.equal(encoder(video(8)), encoder(video(8)[:, :, :5]))


def test_patches_put_the_column_offset_before_the_row_offset():
    x = torch.arange(4.0).view(1, 1, 1, 2, 2).expand(1, 3, 1, 2, 2)  # rows (0, 1) and (2, 3)
    assert patchify(x).flatten().tolist() == [0, 2, 1, 3] * 3


def test_a_single_frame_fills_the_last_time_slot_of_the_shortcut():
    x = video(1)
    y = average_shortcut(x, cout=6, ft=2, fs=2)
    assert torch.equal(y[:, ::2], torch.zeros_like(y[:, ::2]))
    assert torch.allclose(y[:, 1::2, 0], F.avg_pool2d(x[:, :, 0], 2))


def test_without_the_weights_of_other_frames_a_picture_encodes_the_same():
    encoder = wan()
    expected = encoder(video(1))
    encoder.keep_one_frame()
    assert torch.equal(encoder(video(1)), expected)
    with pytest.raises(RequestError, match="was given 5 frames"):
        encoder(video(5))


def test_the_weights_of_one_frame_are_216_megabytes():
    with torch.device("meta"):
        encoder = WanEncoder(WanEncoderConfig())
    encoder.keep_one_frame()
    assert sum(4 * p.numel() for p in encoder.parameters()) == pytest.approx(215.5e6, rel=1e-3)


def test_a_picture_comes_out_in_the_scale_of_the_sampler():
    encoder = wan()
    latent = encode_picture(encoder, video(1))
    assert latent.shape == (1, 48, 1, 2, 3)
    assert torch.equal(latent, normalise(encoder(video(1))))


@pytest.fixture
def tf32():
    """TF32 switched on for convolutions and products, as a program around ours may have it."""
    places = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = True
    yield
    for place, value in zip(places, before, strict=True):
        place.allow_tf32 = value


@pytest.mark.usefixtures("tf32")
def test_the_encoder_runs_without_tf32_and_puts_the_switch_back():
    encoder, seen = wan(), []
    encoder.conv1.register_forward_hook(
        lambda *_: seen.append((torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
    )
    encoder(video(1))
    assert seen == [("ieee", "ieee")]
    assert torch.backends.cudnn.allow_tf32 is True
    assert torch.backends.cuda.matmul.allow_tf32 is True


@pytest.mark.usefixtures("tf32")
def test_the_switch_is_put_back_after_an_error():
    with pytest.raises(KeyError), true_fp32():
        raise KeyError
    assert torch.backends.cudnn.allow_tf32 is True


def test_lists_of_unequal_length_are_refused():
    with pytest.raises(CheckpointError, match="temporal_downsample has 2 entries"):
        WanEncoderConfig(temporal_downsample=(False, True))
