"""A reference picture, from a file or the graph, to the pixels that the Wan encoder reads (40 §1)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from ..errors import RequestError
from ..sampling.geometry import reference_size, reference_target

CANVAS = (255, 255, 255)  # 40 §1 step 3: the letterbox is white


@dataclass(frozen=True)
class PictureFit:
    """How a picture becomes the encoder's input; all sizes are (width, height), the place is (x, y) (40 §1)."""

    resized: tuple[int, int]
    canvas: tuple[int, int]
    place: tuple[int, int]
    final: tuple[int, int]


def fit_picture(picture_width: int, picture_height: int, width: int, height: int) -> PictureFit:
    """The sizes on the way from a picture to the encoder's input, for a clip of width x height pixels (40 §1).

    RequestError if a side of the input would floor to zero.
    """
    tw, th = reference_target(picture_width, picture_height, width, height)
    final = reference_size(picture_width, picture_height, width, height)
    scale = min(tw / picture_width, th / picture_height)
    # 40 §1 step 3: the target was truncated, so a side can come out one pixel short: a white line, kept
    rw, rh = max(1, round(picture_width * scale)), max(1, round(picture_height * scale))
    return PictureFit((rw, rh), (tw, th), ((tw - rw) // 2, (th - rh) // 2), final)


def read_picture(path: str | Path) -> Image.Image:
    """Read a picture file as 8-bit RGB, turned as its EXIF orientation says (40 §1 step 1).

    Alpha is dropped, grey is replicated; values of 16-bit pictures are cut at 255, as the reference does, so convert
    those to 8 bits beforehand. RequestError if the file is missing or is not a picture that Pillow can read.
    """
    # Reading a pipe would wait for its writer. Where a folder may not be entered, Path's own three raise.
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise RequestError(f"{path} is not a file; a picture must be one.")
    try:
        with Image.open(path) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except FileNotFoundError:
        raise RequestError(f"There is no picture at {path}.") from None
    except IsADirectoryError:
        raise RequestError(f"{path} is a folder, not a picture.") from None
    except UnidentifiedImageError:
        raise RequestError(f"{path} is not a picture in a format that can be read; use PNG, JPEG or WebP.") from None
    except Image.DecompressionBombError as error:
        raise RequestError(f"The picture {path} is too large: {error}") from None
    except (OSError, ValueError, SyntaxError) as error:  # Pillow raises any of these for damaged files
        raise RequestError(f"The picture {path} cannot be read: {error}. The file may be damaged.") from None


def pictures_from_tensor(image: Tensor) -> list[Image.Image]:
    """An IMAGE of the graph, [B, H, W, C] or [H, W, C] floats in 0..1, as 8-bit RGB pictures (40 §1).

    C is 1 (grey), 3 or 4 (alpha is dropped). Values are rounded, not truncated: they need not be exact k/255. Those
    outside 0..1 are clipped. RequestError for anything else.
    """
    batch = image.unsqueeze(0) if image.dim() == 3 else image
    if batch.dim() != 4 or batch.shape[-1] not in (1, 3, 4) or 0 in batch.shape:
        raise RequestError(
            f"The picture has the shape {tuple(image.shape)}; it must be [batch, height, width, channels] with 1, 3 or"
            " 4 channels, and not empty."
        )
    if not batch.is_floating_point():
        raise RequestError(f"The picture holds {batch.dtype} values; it must hold floats between 0 and 1.")
    pixels = batch.detach().to("cpu", torch.float32)
    if not torch.isfinite(pixels).all():
        raise RequestError("The picture holds values that are not finite numbers; check the node that made it.")
    pixels = (pixels * 255).round_().clamp_(0, 255).to(torch.uint8)[..., :3]  # 40 trap 10: rounded
    return [Image.fromarray(each.expand(-1, -1, 3).contiguous().numpy()) for each in pixels]


def prepare_picture(picture: Image.Image, width: int, height: int) -> Tensor:
    """An 8-bit RGB picture to pixels [1, 3, 1, H, W] fp32 in [-1, 1], for a clip of width x height pixels (40 §1).

    Two Lanczos resizes and a white letterbox, and every value rounded to bfloat16. RequestError as `fit_picture`.
    """
    fit = fit_picture(*picture.size, width, height)
    canvas = letterbox(picture, fit)
    final = canvas.resize(fit.final, Image.Resampling.LANCZOS)
    pixels = to_pixels(final)
    return pixels.to(torch.bfloat16).unsqueeze(2).to(torch.float32)  # 40 §1 step 6


def letterbox(picture: Image.Image, fit: PictureFit) -> Image.Image:
    """The picture in its first size on the white canvas (40 §1 step 3)."""
    canvas = Image.new("RGB", fit.canvas, CANVAS)
    canvas.paste(picture.resize(fit.resized, Image.Resampling.LANCZOS), fit.place)
    return canvas


def to_pixels(picture: Image.Image) -> Tensor:
    """8-bit RGB to [1, 3, H, W] fp32 in [-1, 1], not yet rounded to bfloat16 (40 §1 step 5)."""
    pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255.0)
    return 2.0 * pixels.permute(2, 0, 1).unsqueeze(0) - 1.0
