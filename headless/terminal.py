"""What a command shows while it works: a progress bar with time left for people, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Self

from torch import Tensor
from tqdm import tqdm

STAGES = {
    "load": "Loading weights",
    "encode_text": "Reading the prompt",
    "encode_image": "Looking at the picture",
    "sample": "Sampling",
    "refine": "Refining",
    "decode_video": "Decoding the picture",
    "decode_audio": "Decoding the sound",
}


class TerminalEvents:
    """One progress bar on stderr for the stage that is running; nothing if stderr is not a terminal but log lines."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._stage = ""

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        if stage != self._stage or self._bar is None or self._bar.total != total or done < self._bar.n:
            self.close()
            self._stage = stage
            self._bar = tqdm(total=total, desc=STAGES.get(stage, stage), file=sys.stderr, leave=True, mininterval=0.2)
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def log(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def check(self) -> None:
        """Ctrl-C raises KeyboardInterrupt by itself, in the main thread, wherever it is."""

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._stage = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class JsonEvents:
    """One JSON object a line on stdout: progress with seconds left, log lines."""

    def __init__(self) -> None:
        self._stage = ""
        self._started = 0.0

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        now = time.monotonic()
        if stage != self._stage or done <= 1:
            self._stage, self._started = stage, now if done == 0 else self._started or now
        left = (now - self._started) / done * (total - done) if done else None
        write_json({"event": "progress", "stage": stage, "done": done, "total": total,
                    "seconds_left": None if left is None else round(left, 1)})

    def log(self, text: str) -> None:
        write_json({"event": "log", "text": text})

    def check(self) -> None:
        """Ctrl-C raises KeyboardInterrupt by itself, in the main thread, wherever it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass


def write_json(value: dict[str, object]) -> None:
    """Write one JSON line to stdout, at once."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()
