"""Reference pictures: reading, fitting, and the pixels that the encoder sees (40 §1, 20 §6.4)."""

import os

import numpy as np
import pytest
import torch
from magi2_native.magi2_core.codecs.picture import (
    fit_picture,
    letterbox,
    pictures_from_tensor,
    prepare_picture,
    read_picture,
)
from magi2_native.magi2_core.errors import RequestError
from PIL import Image


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def saved(folder, pixels: np.ndarray, name: str = "picture.png", **options):
    path = folder / name
    Image.fromarray(pixels).save(path, **options)
    return path


def test_the_sizes_of_a_picture_on_its_way():
    fit = fit_picture(1000, 667, 896, 512)
    assert (fit.canvas, fit.resized, fit.place, fit.final) == ((896, 597), (895, 597), (0, 0), (896, 576))


def test_only_the_longer_side_of_the_clip_matters():
    assert fit_picture(1000, 667, 512, 896) == fit_picture(1000, 667, 896, 512)


def test_integers_are_multiplied_before_they_are_divided():
    assert fit_picture(110, 55, 448, 256).canvas == (448, 224)


@pytest.mark.parametrize("size", [(1, 1), (37, 91), (91, 37), (50, 50), (4000, 300)])
def test_any_size_is_brought_to_multiples_of_32(size):
    pixels = prepare_picture(Image.fromarray(noise(*size)), 448, 256)
    assert pixels.dtype == torch.float32
    assert pixels.shape[:3] == (1, 3, 1)
    assert pixels.shape[3] % 32 == 0
    assert pixels.shape[4] % 32 == 0
    assert max(pixels.shape[3:]) == 448


@pytest.mark.parametrize(
    ("size", "clip"), [((28, 1), (448, 256)), ((1, 28), (448, 256)), ((4000, 100), (896, 512))], ids=str
)
def test_a_picture_whose_side_floors_to_zero_is_refused(size, clip):
    with pytest.raises(RequestError, match=f"{size[0]}x{size[1]}, too long and narrow"):
        prepare_picture(Image.new("RGB", size), *clip)


def test_a_picture_of_28_to_1_is_accepted_at_540p():
    assert prepare_picture(Image.new("RGB", (28, 1)), 896, 512).shape == (1, 3, 1, 32, 896)


def test_the_letterbox_is_white_where_the_picture_is_one_pixel_short():
    black = Image.new("RGB", (1000, 667))
    canvas = np.array(letterbox(black, fit_picture(1000, 667, 896, 512)))
    assert canvas.shape == (597, 896, 3)
    assert (canvas[:, -1] == 255).all()
    assert (canvas[:, :-1] == 0).all()


def test_the_pixels_are_rounded_to_bfloat16():
    pixels = prepare_picture(Image.fromarray(noise(96, 64)), 96, 64)
    assert torch.equal(pixels, pixels.to(torch.bfloat16).float())
    exact = 2 * torch.from_numpy(noise(96, 64).astype(np.float32) / 255).permute(2, 0, 1) - 1
    assert not torch.equal(pixels[0, :, 0], exact)
    assert (pixels[0, :, 0] - exact).abs().max() <= 2**-8


def test_a_picture_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter to the right
    pixels = noise(20, 10)
    path = saved(tmp_path, pixels, exif=exif)
    assert np.array_equal(np.array(read_picture(path)), np.rot90(pixels, -1))


def test_alpha_is_dropped_and_the_hidden_colour_shows(tmp_path):
    pixels = noise(8, 8, 4)
    pixels[..., 3] = 0
    assert np.array_equal(np.array(read_picture(saved(tmp_path, pixels))), pixels[..., :3])


def test_grey_is_replicated(tmp_path):
    pixels = noise(8, 8, 1)
    assert np.array_equal(np.array(read_picture(saved(tmp_path, pixels))), np.repeat(pixels[..., None], 3, 2))


def test_sixteen_bit_values_are_cut_at_255(tmp_path):
    pixels = np.array([[0, 255, 256, 65535]], dtype=np.uint16)
    assert np.array(read_picture(saved(tmp_path, pixels)))[0, :, 0].tolist() == [0, 255, 255, 255]


def test_a_palette_and_cmyk_are_converted(tmp_path):
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    red.convert("P").save(tmp_path / "p.png")
    red.convert("CMYK").save(tmp_path / "c.tiff")
    for name in ("p.png", "c.tiff"):
        assert np.array(read_picture(tmp_path / name))[0, 0].tolist() == [255, 0, 0]


def test_unreadable_pictures_are_named_in_a_sentence(tmp_path):
    (tmp_path / "text.png").write_text("not a picture")
    whole = saved(tmp_path, noise(64, 64), "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.png").touch()
    for name, said in (
        ("absent.png", "There is no picture at"),
        ("", "is a folder, not a picture"),
        ("text.png", "is not a picture in a format"),
        ("empty.png", "is not a picture in a format"),
        ("cut.png", "cannot be read: .*damaged"),
    ):
        with pytest.raises(RequestError, match=said):
            read_picture(tmp_path / name)


def test_a_device_and_a_pipe_are_refused_unread(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for path in ("/dev/null", tmp_path / "pipe.png"):  # in this order: reading the pipe would never end
        with pytest.raises(RequestError, match=f"{path} is not a file"):
            read_picture(path)


def test_an_enormous_picture_is_refused(tmp_path, monkeypatch):
    path = saved(tmp_path, noise(64, 64))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(RequestError, match="too large"):
        read_picture(path)


def test_tensor_values_are_rounded_and_clipped():
    values = torch.tensor([-0.5, 0.4 / 255, 0.6 / 255, 100.4 / 255, 100.6 / 255, 1.5])
    [picture] = pictures_from_tensor(values.view(1, 1, 6, 1).expand(1, 1, 6, 3))
    assert np.array(picture)[0, :, 0].tolist() == [0, 0, 1, 100, 101, 255]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_may_be_of_any_float_precision(dtype):
    image = torch.tensor([0.0, 0.5, 1.0], dtype=dtype).view(1, 1, 3, 1).expand(1, 1, 3, 3)
    [picture] = pictures_from_tensor(image)
    assert np.array(picture)[0, :, 0].tolist() == [0, 128, 255]


def test_tensors_of_grey_and_alpha_become_rgb():
    grey = pictures_from_tensor(torch.full((1, 2, 3, 1), 0.2))[0]
    assert (grey.mode, grey.size) == ("RGB", (3, 2))
    assert (np.array(grey) == 51).all()
    colour = torch.tensor([0.2, 0.4, 0.6, 0.0]).expand(1, 2, 3, 4)
    assert np.array(pictures_from_tensor(colour)[0])[0, 0].tolist() == [51, 102, 153]


def test_a_batch_is_as_many_pictures():
    image = torch.stack([torch.full((4, 5, 3), k / 255) for k in range(3)])
    pictures = pictures_from_tensor(image)
    assert [np.array(p)[0, 0, 0] for p in pictures] == [0, 1, 2]
    assert len(pictures_from_tensor(image[0])) == 1


def test_a_picture_saved_and_one_from_the_graph_are_the_same(tmp_path):
    pixels = noise(70, 45)
    from_file = prepare_picture(read_picture(saved(tmp_path, pixels)), 448, 256)
    from_graph = prepare_picture(pictures_from_tensor(torch.from_numpy(pixels).float()[None] / 255)[0], 448, 256)
    assert torch.equal(from_file, from_graph)


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (torch.zeros(0, 4, 4, 3), "not empty"),
        (torch.zeros(1, 4, 4, 2), r"\(1, 4, 4, 2\)"),
        (torch.zeros(4, 4), r"\(4, 4\)"),
        (torch.zeros(1, 4, 4, 3, dtype=torch.uint8), "uint8"),
        (torch.full((1, 4, 4, 3), float("nan")), "not finite"),
        (torch.full((1, 4, 4, 3), float("inf")), "not finite"),
    ],
    ids=["empty", "two channels", "flat", "integers", "nan", "infinite"],
)
def test_a_tensor_that_is_no_picture_is_refused(image, said):
    with pytest.raises(RequestError, match=said):
        pictures_from_tensor(image)
