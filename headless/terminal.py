"""What a command shows while it works: a progress bar with time left for people, JSON lines for machines."""

from __future__ import annotations

import json
import sys
import time
from types import TracebackType
from typing import Any, Self

from torch import Tensor
from tqdm import tqdm

from ..stages.progress import STAGES, TimeLeft

QUIET_SECONDS = 10.0  # between two lines about the same stage, where there is no bar
JSON_SECONDS = 0.1  # the same for machines: loading reports each of thousands of tensors


class _Shown:
    """What all listeners of a command share."""

    def __init__(self) -> None:
        self._left = TimeLeft()

    def check(self) -> None:
        """Ctrl-C raises KeyboardInterrupt by itself, in the main thread, wherever it is."""

    def close(self) -> None:
        """End what is shown of a stage."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TerminalEvents(_Shown):
    """On stderr: a bar for the stage that is running, or where that is no terminal now and then a line."""

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm[Any] | None = None
        self._said = 0.0

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        starts = self._left.starts(stage, done, total)
        name = STAGES.get(stage, stage)
        if not sys.stderr.isatty():
            self._say(f"{name}: {done} of {total}", starts, done == total)
            return
        if starts or self._bar is None:
            self.close()
            self._bar = tqdm(total=total, initial=done, desc=name, file=sys.stderr, mininterval=0.2)
        self._bar.update(done - self._bar.n)
        if done == total:
            self.close()

    def _say(self, text: str, starts: bool, ends: bool) -> None:
        now, left = time.monotonic(), self._left.seconds
        if starts or ends or now - self._said >= QUIET_SECONDS:
            self._said = now
            self.log(text if ends or left is None else f"{text}, {tqdm.format_interval(left)} left")

    def log(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class JsonEvents(_Shown):
    """One JSON object a line on stdout: progress with seconds left, log lines."""

    def __init__(self) -> None:
        super().__init__()
        self._said = 0.0

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        now, starts = time.monotonic(), self._left.starts(stage, done, total)
        if not starts and done < total and now - self._said < JSON_SECONDS:
            return
        self._said, left = now, self._left.seconds
        write_json({"event": "progress", "stage": stage, "done": done, "total": total,
                    "seconds_left": None if left is None else round(left, 1)})

    def log(self, text: str) -> None:
        write_json({"event": "log", "text": text})


def write_json(value: dict[str, object]) -> None:
    """Write one JSON line to stdout, at once. ASCII alone: what a path holds may be no character at all."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
