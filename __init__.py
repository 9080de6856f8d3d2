"""MAGI-2 Native: the door through which ComfyUI loads the pack.

Importing this package defines names and does nothing else: no device is touched, no process is started and no
optional dependency is needed (60 §1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

__version__ = "0.1.0"

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> ComfyExtension:
    """Return the pack's nodes; ComfyUI calls this once at start."""
    from .nodes import extension

    return extension()
