"""What a running stage is called, and how long it will still take."""

from __future__ import annotations

import time

# The panel has the same names in its own languages (web/js/texts.mjs).
STAGES = {
    "enhance_prompt": "Waiting for the caption",
    "load": "Loading weights",
    "release": "Unloading weights",
    "encode_text": "Encoding the prompt",
    "encode_image": "Encoding the picture",
    "sample": "Sampling",
    "refine": "Refining",
    "decode_video": "Decoding frames",
    "decode_audio": "Decoding sound",
    "write_clip": "Writing the clip",
    "convert": "Converting files",
    "write miniature": "Writing weights",
}


class TimeLeft:
    """Estimates the end of a stage from the pace since its first report, which a stage may begin anywhere."""

    def __init__(self) -> None:
        self._stage, self._total, self._began, self._first, self._done = "", 0, 0.0, 0, 0

    def starts(self, stage: str, done: int, total: int) -> bool:
        """Take in a report; whether it is the first one of a stage."""
        starts = stage != self._stage or total != self._total or done < self._done
        if starts:
            self._stage, self._total, self._began, self._first = stage, total, time.monotonic(), done
        self._done = done
        return starts

    @property
    def each(self) -> float | None:
        """Seconds that one unit takes; None until the pace is known."""
        units = self._done - self._first
        return (time.monotonic() - self._began) / units if units else None

    @property
    def seconds(self) -> float | None:
        """Seconds to the end of the stage; None until its pace is known."""
        if self._done == self._total:
            return 0.0
        return None if self.each is None else self.each * (self._total - self._done)
