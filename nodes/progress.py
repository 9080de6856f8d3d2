"""A running stage on the page: bar, one line of text with the time left, moving preview, cancel (60 §4)."""

from __future__ import annotations

import logging
import time

from torch import Tensor

from ..stages.preview import LONGEST, preview_image
from ..stages.progress import STAGES, TimeLeft
from .comfy import ProgressBar, interrupted_check, show_text, wan_colours

logger = logging.getLogger("magi2")

BAR_EVERY_S = 0.1
PREVIEW_EVERY_S = 2.0
STEPS = ("sample", "refine")  # stages whose single step is worth a number


class NodeEvents:
    """Events of one node's execution. All methods run in the thread that executes the node."""

    def __init__(self, node_id: str | None) -> None:
        self._node_id = node_id
        self._bar = ProgressBar(1)
        self._left = TimeLeft()
        self._shown = 0.0
        self._previewed = 0.0
        self._frame = 0

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        """Show the newest state, at most ten times a second, and the last state of every stage."""
        now = time.monotonic()
        starts = self._left.starts(stage, done, total)
        if not starts and done < total and now - self._shown < BAR_EVERY_S:
            return
        self._shown = now
        show_text(self._line(stage, done, total), self._node_id)
        self._bar.update_absolute(done, total, self._preview(latent, now))

    def log(self, text: str) -> None:
        """Show a line in the node and keep it in the server's log."""
        logger.info(text)
        show_text(text, self._node_id)

    def check(self) -> None:
        """Raise ComfyUI's interrupt exception if the user cancelled."""
        interrupted_check()

    def _line(self, stage: str, done: int, total: int) -> str:
        line = f"{STAGES.get(stage, stage)} {done}/{total}"
        each, left = self._left.each, self._left.seconds
        if each and stage in STEPS:
            line += f", {each:.1f} s/step"
        return f"{line}, {_duration(left)} left" if left else line

    def _preview(self, latent: Tensor | None, now: float) -> tuple[str, object, int] | None:
        """A frame of the work so far; each preview shows a later frame, so that the picture moves."""
        if latent is None or now - self._previewed < PREVIEW_EVERY_S:
            return None
        colours = wan_colours()
        if colours is None or latent.shape[0] != len(colours[0]):
            return None
        self._previewed = now
        self._frame += 1
        return ("JPEG", preview_image(latent, *colours, self._frame), LONGEST)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
