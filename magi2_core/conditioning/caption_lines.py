"""The lines that people write into a caption's form: who is there, what happens when, and who says what (30 §10.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError
from ..sampling.geometry import SECONDS

_TIME = r"(?:\d+:)?\d+(?:\.\d+)?"
_TIMED = re.compile(rf"^({_TIME})\s*(?:s\s*)?[-–]\s*({_TIME})\s*(?:s\b)?\s*:?\s+(.*)$")
_SPOKEN = re.compile(r"^(.{1,40}?)\s*[:：]\s*(.*)$")
_SUBJECT = re.compile(r"^<?\s*subject\s+(\d+)\s*>?$", re.IGNORECASE)

# A line of speech as a caption has it, and when it starts in seconds; None without a time.
Speech = tuple[float | None, dict[str, Any]]


@dataclass(frozen=True)
class Segment:
    """A part of the timeline, in seconds."""

    start: float
    end: float
    text: str

    @property
    def timestamp(self) -> str:
        return f"{_clock(self.start)}-{_clock(self.end)}"


def read_rows(text: str) -> list[list[str]]:
    """Each line's three parts between bars, missing ones empty."""
    return [([part.strip() for part in line.split("|")] + ["", ""])[:3] for line in _lines(text)]


def read_timeline(text: str) -> list[Segment]:
    """One segment a line; without times they divide the clip evenly. RequestError for times that do not follow."""
    lines = _lines(text)
    timed = [_TIMED.match(line) for line in lines]
    if not any(timed):
        return [
            Segment(round(SECONDS * i / len(lines), 1), round(SECONDS * (i + 1) / len(lines), 1), line)
            for i, line in enumerate(lines)
        ]
    segments: list[Segment] = []
    for line, match in zip(lines, timed, strict=True):
        if match is None:
            raise RequestError(
                f"The timeline line {line!r} has no time while others have one; write it like '2.5-5 what happens'."
            )
        segment = _segment(match, line)
        if segments and segment.start < segments[-1].end:
            raise RequestError(
                f"The timeline line {line!r} starts before the line above it ends ({_clock(segments[-1].end)});"
                " the lines follow each other."
            )
        segments.append(segment)
    return segments


def read_dialogue(text: str, subjects: int) -> list[Speech]:
    """One line of speech a line; RequestError for one without a speaker, or by none of so many subjects."""
    return [_speech(line, subjects) for line in _lines(text)]


def starts_at(timestamp: Any) -> float | None:
    """The first time in a caption's time stamp, in seconds; None if there is none."""
    found = re.search(_TIME, timestamp) if isinstance(timestamp, str) else None
    return _seconds(found.group()) if found else None


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _speech(line: str, subjects: int) -> Speech:
    timed = _TIMED.match(line)
    interval = _segment(timed, line) if timed else None
    match = _SPOKEN.match(interval.text if interval else line)
    if match is None:
        raise RequestError(f"The dialogue line {line!r} names no speaker; write it like '<subject 1>: the words'.")
    speaker = match[1].strip()
    if subject := _SUBJECT.match(speaker):
        if not 1 <= int(subject[1]) <= subjects:
            known = f"{subjects} subject{'' if subjects == 1 else 's'}"
            raise RequestError(f"The dialogue line {line!r} is spoken by {speaker}, but the caption has {known}.")
        speaker = f"<subject {int(subject[1])}>"
    text, _, delivery = match[2].partition("|")
    when = interval.timestamp if interval else ""
    return starts_at(when), {
        "timestamp": when, "speaker": speaker, "text": text.strip(), "delivery": delivery.strip()
    }  # fmt: skip


def _segment(match: re.Match[str], line: str) -> Segment:
    start, end = _seconds(match[1]), _seconds(match[2])
    if not 0 <= start < end <= SECONDS:
        raise RequestError(f"The time of the line {line!r} must lie between 0 and {SECONDS:g} seconds and go forward.")
    return Segment(start, end, match[3].strip())


def _seconds(time: str) -> float:
    minutes, _, seconds = time.rpartition(":")
    return 60 * float(minutes or 0) + float(seconds)


def _clock(seconds: float) -> str:
    """Seconds in the captions' spelling, MM:SS.s (30 §10.1)."""
    tenths = round(seconds * 10)
    return f"{tenths // 600:02d}:{tenths // 10 % 60:02d}.{tenths % 10}"
