"""A short prompt to a caption, by the language model that the user has set up (30 §10)."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..magi2_core.conditioning.endpoint import DEFAULT_BASE_URL, SETTINGS_FILE, VARIABLES, Endpoint, find_endpoint
from ..magi2_core.errors import MissingDependencyError, RequestError, check_choice
from ..magi2_core.events import Events
from .folders import Folders
from .prompt import check_prompt

if TYPE_CHECKING:
    from ..magi2_core.conditioning.enhance import Enhanced, Enhancer

ON_FAILURE = ("stop", "original")
MOST_VARIATIONS = 1_000_000
CACHE_FOLDER = "captions"

_passed_on: Counter[tuple[str, int]] = Counter()  # how often a prompt was used as it is


def enhance_prompt(
    prompt: str,
    on_failure: str = ON_FAILURE[0],
    variation: int = 0,
    image: Tensor | None = None,
    *,
    events: Events,
    folders: Folders,
) -> Enhanced:
    """Ask the language model for a caption of the prompt, and of the picture (IMAGE [1, H, W, C]) if there is one.

    Its address, name and key come from the environment or from a file in the user's folder, and leave in no result. An
    unchanged question is answered from a cache, also after a restart. `variation` above 0 asks for another caption.
    With on_failure "original" a failure gives the prompt back with a warning; else RequestError. Cancelling passes
    through.
    """
    check_choice("on_failure", on_failure, ON_FAILURE)
    check_variation(variation)
    check_prompt(prompt, "")
    picture = None if image is None else _picture(image)
    try:
        enhancer = enhancer_of(folders.user)
    except RequestError as error:
        if on_failure == "stop":
            raise
        from ..magi2_core.conditioning.enhance import as_it_is

        enhanced = as_it_is(prompt, error, events)
    else:
        wish = str(variation) if variation else ""
        enhanced = enhancer.enhance(
            prompt, picture, events, on_failure="original" if on_failure == "original" else "stop", variation=wish
        )
    if enhanced.caption is None:
        _passed_on[prompt, variation] += 1
    return enhanced


def check_variation(variation: int) -> None:
    """RequestError for a variation outside 0 to MOST_VARIATIONS."""
    if not 0 <= variation <= MOST_VARIATIONS:
        raise RequestError(f"The variation is {variation}; it must be 0 (none) to {MOST_VARIATIONS}.")


def enhance_identity(prompt: str | None, variation: int | None, folders: Folders) -> str:
    """Changes when the language model or the user's instructions do, and after a prompt was used as it is, which is
    worth another try.

    Kept with the workflow by ComfyUI, so it holds no address and no key. Never raises.
    """
    try:
        endpoint = find_endpoint(folders.user)
        own_texts = [] if folders.user is None else sorted(folders.user.glob("enhance_*.md"))
        changed = [f"{file.name} {file.stat().st_mtime_ns}" for file in own_texts]
    except (RequestError, OSError):
        endpoint, changed = None, []
    where = [] if endpoint is None else [endpoint.host, endpoint.model]
    # a linked input (None) may be any
    tries = sum(n for (p, v), n in _passed_on.items() if prompt in (None, p) and variation in (None, v))
    return f"{hashlib.sha256(' '.join([*where, *changed]).encode()).hexdigest()[:16]} {tries}"


def describe_enhanced(enhanced: Enhanced, folders: Folders) -> str:
    """What the node shows: where the caption comes from, then the caption."""
    lines = list(enhanced.warnings)
    endpoint = None if enhanced.caption is None else find_endpoint(folders.user)
    if endpoint is not None:
        source = "kept from an earlier run" if enhanced.from_cache else "made"
        lines.insert(0, f"The caption was {source} by {endpoint.model} at {endpoint.host}.")
    return "\n".join([*lines, "", enhanced.caption_json or enhanced.prompt])


def _picture(image: Tensor) -> Any:
    from ..magi2_core.codecs.picture import pictures_from_tensor

    pictures = pictures_from_tensor(image)
    if len(pictures) != 1:
        raise RequestError(f"{len(pictures)} pictures arrived in one batch; a prompt is enhanced with one picture.")
    return pictures[0]


def enhancer_of(user: Path | None) -> Enhancer:
    """The enhancer that the user set up; RequestError if there is none. `user` holds own settings and texts."""
    endpoint = find_endpoint(user)
    if endpoint is None:
        file = f", or write them into {user / SETTINGS_FILE}" if user is not None else ""
        raise RequestError(
            f"No language model is set up for enhancing prompts. Set {VARIABLES['base_url']} (the address of an"
            f" OpenAI-compatible server, like {DEFAULT_BASE_URL}), {VARIABLES['model']} and, if it needs one,"
            f" {VARIABLES['api_key']} in the environment{file}."
        )
    return _enhancer(endpoint, user)


@lru_cache(maxsize=1)
def _enhancer(endpoint: Endpoint, user: Path | None) -> Enhancer:
    try:
        from ..magi2_core.conditioning.enhance import Enhancer
    except ImportError as error:
        raise MissingDependencyError(
            f"Enhancing a prompt needs the package pydantic: {error}. Install it with: pip install pydantic"
        ) from error
    return Enhancer(endpoint, texts_folder=user, cache_folder=user / CACHE_FOLDER if user is not None else None)
