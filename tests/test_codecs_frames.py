"""Decoded video to frames, and frames to another size (40 §4.7, §6)."""

import pytest
import torch
from magi2_native.magi2_core.codecs.frames import resize, to_uint8
from magi2_native.stages.decode import image_from_frames


def test_values_are_truncated_not_rounded():
    x = torch.tensor([-1.0, -0.9, 0.0, 0.999, 1.0]).view(1, 1, 1, 1, 5).expand(1, 3, 1, 1, 5)
    assert to_uint8(x)[0, 0, :, 0].tolist() == [0, 12, 127, 254, 255]  # 12.75, 127.5 and 254.87 lose their fractions


def test_values_outside_the_range_are_clamped():
    x = torch.tensor([-3.0, 3.0]).view(1, 1, 1, 1, 2).expand(1, 3, 1, 1, 2)
    assert to_uint8(x)[0, 0, :, 0].tolist() == [0, 255]


def test_bfloat16_is_mapped_in_fp32():
    x = torch.linspace(-1, 1, 4096).to(torch.bfloat16).view(1, 1, 1, 64, 64).expand(1, 3, 1, 64, 64)
    in_fp32, in_bfloat16 = ((y * 0.5 + 0.5) * 255 for y in (x[0, 0, 0].float(), x[0, 0, 0]))
    assert torch.equal(to_uint8(x)[0, ..., 0], in_fp32.to(torch.uint8))
    assert not torch.equal(to_uint8(x)[0, ..., 0], in_bfloat16.to(torch.uint8))


def test_an_image_truncated_by_a_saver_gives_the_same_frames():
    x = torch.randn(1, 3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal((image_from_frames(to_uint8(x)) * 255).to(torch.uint8), to_uint8(x))


def test_frames_are_time_row_column_colour():
    x = torch.zeros(1, 3, 2, 3, 4)
    x[0, 1, 1, 2, 3] = 1
    frames = to_uint8(x)
    assert frames.shape == (2, 3, 4, 3)
    assert (frames == 255).nonzero().tolist() == [[1, 2, 3, 1]]


def test_a_resize_to_the_same_size_changes_no_value():
    frames = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(1, 16, 16, 3).contiguous()
    assert torch.equal(resize(frames, 16, 16), frames)


def test_a_resize_is_bilinear_and_truncated():
    frames = torch.tensor([10, 21], dtype=torch.uint8).view(1, 1, 2, 1).expand(1, 1, 2, 3)
    # centres of four pixels over two: 10, 12.75, 18.25, 21
    assert resize(frames, 4, 1)[0, 0, :, 0].tolist() == [10, 12, 18, 21]


def test_shrinking_is_not_antialiased():
    frames = torch.zeros(1, 1, 8, 3, dtype=torch.uint8)
    frames[0, 0, 0] = 255  # far from the two places that are read for each new pixel
    assert resize(frames, 2, 1).max() == 0


@pytest.mark.parametrize(("width", "height"), [(1920, 1080), (1, 1), (49, 33)])
def test_a_resize_gives_the_size_asked_for(width, height):
    frames = torch.zeros(1, 32, 48, 3, dtype=torch.uint8)
    assert resize(frames, width, height).shape == (1, height, width, 3)
