"""What a command shows while it works: a bar on a terminal, now and then a line elsewhere, JSON for machines."""

from __future__ import annotations

import io
import json
import sys

import pytest
from magi2_native.headless import terminal
from magi2_native.headless.terminal import JsonEvents, TerminalEvents
from magi2_native.stages.progress import TimeLeft


class Clock:
    """A clock that tests set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(terminal.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_time_left_follows_the_pace_since_the_first_report(clock: Clock) -> None:
    left = TimeLeft()
    assert left.starts("sample", 0, 100)
    assert left.seconds is None
    clock.now += 8
    assert not left.starts("sample", 4, 100)
    assert left.seconds == pytest.approx(192)


def test_a_stage_that_begins_with_its_first_unit_done_is_timed_from_there(clock: Clock) -> None:
    """And not from the stage before it."""
    left = TimeLeft()
    left.starts("encode_text", 62, 62)
    clock.now += 3600
    assert left.starts("load", 1, 11)
    assert left.seconds is None
    clock.now += 5
    left.starts("load", 6, 11)
    assert left.seconds == pytest.approx(5)


def test_the_same_stage_again_is_another_stage(clock: Clock) -> None:
    left = TimeLeft()
    assert [left.starts("load", done, 2) for done in (1, 2, 1, 2)] == [True, False, True, False]
    assert left.seconds == 0


def test_a_terminal_shows_the_stage_a_bar_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with TerminalEvents() as events:
        for done in range(4):
            events.progress("sample", done, 4)
            events._bar.refresh() if events._bar else None
        events.log("The prompt is long.")
        events.progress("sample", 4, 4)
    shown = screen.getvalue()
    assert "Sampling:  75%" in shown
    assert "3/4 [" in shown
    assert "<" in shown.partition("3/4 [")[2].partition("]")[0], "no time left"
    assert "The prompt is long.\n" in shown
    assert shown.endswith("\n"), "the next line would continue the bar"


def test_a_stage_that_is_interrupted_ends_its_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with TerminalEvents() as events:
        events.progress("sample", 1, 4)
    assert screen.getvalue().endswith("\n")
    assert events._bar is None


def test_without_a_terminal_there_are_few_plain_lines(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with TerminalEvents() as events:
        for done in range(101):
            clock.now += 1
            events.progress("sample", done, 100)
    lines = pipe.getvalue().splitlines()
    assert lines[0] == "Sampling: 0 of 100"
    assert lines[1] == "Sampling: 10 of 100, 01:30 left"
    assert lines[-1] == "Sampling: 100 of 100"
    assert len(lines) == 11
    assert not set("\r\x1b") & set(pipe.getvalue())


def test_machines_get_every_step_but_not_every_tensor(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with JsonEvents() as events:
        for done in range(1, 1372):
            events.progress("load", done, 1371)
        for done in range(4):
            clock.now += 2
            events.progress("sample", done, 3)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["done"], line["seconds_left"]) for line in lines if line["stage"] == "load"] == [(1, None), (1371, 0)]
    steps = [(line["done"], line["seconds_left"]) for line in lines if line["stage"] == "sample"]
    assert steps == [(0, None), (1, 4), (2, 2), (3, 0)]


def test_a_json_line_holds_any_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of a surrogate pair is no character, but a file name may hold one."""
    with JsonEvents() as events:
        events.log("clip \udce4 \u20ac\nnext")
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert out.isascii()
    assert json.loads(out) == {"event": "log", "text": "clip \udce4 \u20ac\nnext"}
