"""Give the memory of the workers back."""

from __future__ import annotations

from ..magi2_core.errors import check_choice
from .manager import manager

WHAT = ("weights", "workers")


def free(what: str) -> bool:
    """Free the weights, or with the workers everything that they hold; False if there was nothing to free."""
    check_choice("what", what, WHAT)
    return manager.stop() if what == "workers" else manager.unload()
