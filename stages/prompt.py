"""Text and picture to conditioning (30, 20 §6.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..magi2_core.conditioning.markers import check_equal_sizes, figure_number, marker, picture_order
from ..magi2_core.conditioning.prompt import check_text
from ..magi2_core.errors import RequestError
from ..magi2_core.events import Events
from ..magi2_core.sampling.geometry import TIERS, reference_size
from .checkpoint import check_pictures
from .manager import manager
from .values import Conditioning, Model

MOST_PICTURES = 16  # each takes as many tokens as a latent frame


def check_prompt(prompt: str, negative_prompt: str) -> None:
    """RequestError for a prompt that cannot be encoded, found before any weight is read."""
    if not prompt.strip():
        raise RequestError("The prompt is empty; describe what the clip should show and sound like.")
    check_text(prompt)
    check_text(negative_prompt, "negative prompt")


def check_picture_to_come(model: Model, for_picture: bool) -> None:
    """CheckpointError if the prompt is for a picture and the checkpoint can take none."""
    if for_picture:
        check_pictures(model)


def encode_prompt(
    model: Model, prompt: str, negative_prompt: str, for_picture: bool = False, *, events: Events
) -> Conditioning:
    """Encode both prompts. An empty negative prompt means that the second branch has no text (30 §7).

    `for_picture` adds the sentence about the first frame at once (30 §5), so that `condition_on_picture` has nothing
    left to encode for one picture. CheckpointError for a checkpoint that then cannot take the picture.
    """
    check_prompt(prompt, negative_prompt)
    check_picture_to_come(model, for_picture)
    figures = [1] if for_picture else []
    return _encode(model, prompt, negative_prompt, figures, [], events)


def condition_on_picture(conditioning: Conditioning, image: Tensor, *, events: Events) -> Conditioning:
    """Make the clip start from a picture: IMAGE [M, H, W, 1|3|4], any float type, values outside 0..1 clipped.

    More pictures, of a batch or of a conditioning that has some already, are references of the same size: they are
    numbered as they come, <Figure 1>, <Figure 2>, ..., and put in the reference's order. The prompt is encoded again,
    with the sentence about the first frame, unless that was done for the same figures already. CheckpointError for a
    checkpoint that cannot take pictures.
    """
    check_pictures(conditioning["model"])
    known = dict(zip(conditioning["figures"], conditioning["pictures"], strict=False))  # none yet with for_picture
    known |= enumerate(pictures_from_image(image), len(known) + 1)
    check_picture_count(len(known))
    sizes = {marker(figure): sizes_at_tiers(picture) for figure, picture in sorted(known.items())}
    for name in sizes[marker(1)]:
        check_equal_sizes({key: size[name] for key, size in sizes.items() if name in size})
    figures = [figure_number(key) for key in picture_order(sizes)]  # 30 §5: from ten on not that of the numbers
    pictures = [known[figure] for figure in figures]
    if conditioning["figures"] == figures:
        return {**conditioning, "pictures": pictures}
    return _encode(
        conditioning["model"], conditioning["prompt"], conditioning["negative_prompt"], figures, pictures, events
    )


def check_picture_count(count: int) -> None:
    """RequestError for more pictures than a sequence should hold."""
    if count > MOST_PICTURES:
        raise RequestError(f"{count} pictures arrived; at most {MOST_PICTURES} can be used.")


def pictures_from_image(image: Tensor) -> list[Tensor]:
    """The pictures of an IMAGE, each as uint8 [H, W, 3] (40 §1)."""
    import numpy as np

    from ..magi2_core.codecs.picture import pictures_from_tensor

    return [torch.from_numpy(np.array(picture)) for picture in pictures_from_tensor(image)]


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


def describe_pictures(conditioning: Conditioning) -> list[str]:
    """A line for each picture that says what becomes of it at each resolution, in the order of their numbers."""
    lines = []
    for figure, picture in sorted(zip(conditioning["figures"], conditioning["pictures"], strict=True)):
        height, width = picture.shape[:2]
        shown = ", ".join(f"{w}x{h} at {name}" for name, (w, h) in sizes_at_tiers(picture).items())
        lines.append(f"{marker(figure)}: the picture of {width}x{height} is used as {shown}.")
    return lines


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
