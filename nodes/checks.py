"""Turns the sentences that stages raise into what ComfyUI's input checks expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..distributed.layout import LayoutError
from ..magi2_core.errors import Magi2Error


def sentence_of(check: Callable[..., Any], *arguments: Any) -> bool | str:
    """True if `check(*arguments)` raises nothing, else its sentence. A linked input is unknown yet (None): True."""
    if any(argument is None for argument in arguments):
        return True
    try:
        check(*arguments)
    except (Magi2Error, LayoutError) as error:
        return str(error)
    except TypeError as error:
        return f"A value has the wrong type: {error}."
    return True


def first_sentence(*answers: bool | str) -> bool | str:
    """The first answer that is a sentence, or True."""
    return next((answer for answer in answers if answer is not True), True)
