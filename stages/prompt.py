"""Text and picture to conditioning (30, 20 §6.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..magi2_core.conditioning.prompt import check_text
from ..magi2_core.errors import RequestError
from ..magi2_core.events import Events
from ..magi2_core.sampling.geometry import TIERS, reference_size
from .manager import manager
from .values import Conditioning, Model

FIGURE = 1  # the project conditions on one picture (20 §6.4)


def check_prompt(prompt: str, negative_prompt: str) -> None:
    """RequestError for a prompt that cannot be encoded, found before any weight is read."""
    if not prompt.strip():
        raise RequestError("The prompt is empty; describe what the clip should show and sound like.")
    check_text(prompt)
    check_text(negative_prompt, "negative prompt")


def encode_prompt(
    model: Model, prompt: str, negative_prompt: str, for_picture: bool = False, *, events: Events
) -> Conditioning:
    """Encode both prompts. An empty negative prompt means that the second branch has no text (30 §7).

    `for_picture` adds the sentence about the first frame at once (30 §5), so that `condition_on_picture` has nothing
    left to encode.
    """
    check_prompt(prompt, negative_prompt)
    figures = [FIGURE] if for_picture else []
    return _encode(model, prompt, negative_prompt, figures, [], events)


def condition_on_picture(conditioning: Conditioning, image: Tensor, *, events: Events) -> Conditioning:
    """Make the clip start from a picture: IMAGE [1, H, W, 1|3|4], any float type, values outside 0..1 clipped.

    The prompt is encoded again, with the sentence about the first frame, unless that was done already.
    """
    picture = picture_from_image(image)
    if conditioning["pictures"]:
        raise RequestError("This conditioning has a picture already; the model takes one picture.")
    sizes_at_tiers(picture)
    if FIGURE in conditioning["figures"]:
        return {**conditioning, "pictures": [picture]}
    return _encode(conditioning["model"], conditioning["prompt"], conditioning["negative_prompt"], [FIGURE],
                   [picture], events)


def picture_from_image(image: Tensor) -> Tensor:
    """An IMAGE with one picture as uint8 [H, W, 3] (40 §1)."""
    import numpy as np

    from ..magi2_core.codecs.picture import pictures_from_tensor

    pictures = pictures_from_tensor(image)
    if len(pictures) != 1:
        raise RequestError(f"{len(pictures)} pictures arrived in one batch; the model takes one picture.")
    return torch.from_numpy(np.array(pictures[0]))


def sizes_at_tiers(picture: Tensor) -> dict[str, tuple[int, int]]:
    """(width, height) that the encoder really sees at each resolution; RequestError if it is too narrow for all.

    Only the clip's longer side matters, so landscape and portrait give the same (20 §6.4).
    """
    height, width = picture.shape[:2]
    sizes, reason = {}, None
    for name, tier in TIERS.items():
        try:
            sizes[name] = reference_size(width, height, *tier.preview)
        except RequestError as error:
            reason = error
    if not sizes and reason is not None:
        raise reason
    return sizes


def describe_picture(picture: Tensor) -> str:
    """One line that says what becomes of a picture at each resolution."""
    height, width = picture.shape[:2]
    shown = ", ".join(f"{w}x{h} at {name}" for name, (w, h) in sizes_at_tiers(picture).items())
    return f"The picture of {width}x{height} is used as {shown}."


def _encode(
    model: Model, prompt: str, negative: str, figures: list[int], pictures: list[Tensor], events: Events
) -> Conditioning:
    text = manager.run(
        model, "encode_text", {"prompt": prompt, "negative_prompt": negative, "figures": figures}, events
    )
    return {
        "model": model,
        "features": text["features"],
        "null_features": text["null_features"],
        "markers": text["markers"],
        "pictures": pictures,
        "figures": figures,
        "prompt": prompt,
        "negative_prompt": negative,
        "encoded_prompt": text["prompt"],
        "tokens": text["tokens"],
        "warnings": list(text["warnings"]),
    }
