"""Calls in which the ranks have unequal work: a cancel, a failure of the first rank and a small device reach all."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.distributed.agreement import StopPage
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.transport import anonymous_file
from magi2_native.magi2_core import engine as module
from magi2_native.magi2_core.codecs.media import VideoWriter
from magi2_native.magi2_core.codecs.turbo_tiles import tile_bytes
from magi2_native.magi2_core.engine import TENSORS_APART, Engine, make_engine
from magi2_native.magi2_core.errors import Magi2Error, RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.memory.plan import Plan
from magi2_native.tests.miniatures import tiny_engine, tiny_plan
from magi2_native.tests.ranks import run_ranks

RANKS = 3
ERRORS = (Magi2Error, ValueError, OSError)


class Stop(BaseException):
    pass


class Agreed(Silent):
    """What a worker's events are: the ranks agree on the check point at which they stop."""

    def __init__(self, page: StopPage) -> None:
        self.page, self.checks = page, 0

    def check(self) -> None:
        if not self.page.passes(1):
            raise Stop
        self.checks += 1


@pytest.fixture
def write(tmp_path: Path) -> dict[str, Any]:
    """Arguments of `write_clip` for 125 frames in five windows."""
    return {
        "video": torch.randn(48, 32, 2, 4, generator=torch.Generator().manual_seed(1)), "waveform": None,
        "sample_rate": 44_100, "path": str(tmp_path / "clip.mp4"), "crf": 10, "fps": "25/2",
    }  # fmt: skip


def outcome(engine: Engine, call: str, arguments: dict[str, Any], events: Any) -> str:
    """What a call ended with, as text."""
    try:
        engine.run(call, arguments, events)
    except (Stop, *ERRORS) as error:
        return f"{type(error).__name__} {error}"
    return "done"


def rank_engine(plan: Plan, rank: int, *loaded: str) -> Engine:
    engine = make_engine(plan.to_dict(), ParallelContext.create(plan.parallel, rank))
    engine.run("load", {"stages": loaded}, Silent())
    return engine


# ---- a cancel


def cancelled(rank: int, plan: Plan, file: int, arguments: dict[str, Any], frame: int) -> tuple[str, int]:
    """A cancel comes while the first rank encodes frame number `frame`, slowly."""
    page, original = StopPage(file, RANKS, rank), VideoWriter._write_frame

    def slow(writer: VideoWriter, pixels: torch.Tensor) -> None:
        if writer.frames == frame:
            page.request_stop(1)
        if writer.frames >= frame:
            time.sleep(0.05)
        original(writer, pixels)

    VideoWriter._write_frame = slow  # type: ignore[method-assign]
    events = Agreed(page)
    return outcome(rank_engine(plan, rank, "video_decoder"), "write_clip", arguments, events), events.checks


@pytest.mark.parametrize("frame", [0, 60, 122])
def test_a_cancel_while_the_first_rank_encodes_stops_all_at_the_next_frame(
    tiny: Path, write: dict[str, Any], frame: int
) -> None:
    file = anonymous_file()
    ends = run_ranks(RANKS, cancelled, tiny_plan(tiny, "sp3"), file, write, frame)
    os.close(file)
    assert {end for end, _ in ends} == {"Stop "}
    assert len({checks for _, checks in ends}) == 1
    assert not list(Path(write["path"]).parent.iterdir())


def cancelled_late(rank: int, plan: Plan, file: int, video: torch.Tensor) -> tuple[str, int]:
    """A cancel comes while the first rank decodes its last window; the last rank has none in that turn."""
    page, original, windows = StopPage(file, RANKS, rank), module.decode_window, []

    def slow(*arguments: Any) -> torch.Tensor:
        windows.append(1)
        block = original(*arguments)
        if rank == 0 and len(windows) == 2:
            time.sleep(0.3)
            page.request_stop(1)
        return block

    module.decode_window = slow
    events = Agreed(page)
    return outcome(rank_engine(plan, rank, "video_decoder"), "decode_video", {"video": video}, events), events.checks


def test_a_cancel_in_the_last_window_finds_no_rank_that_has_left(tiny: Path, write: dict[str, Any]) -> None:
    file = anonymous_file()
    ends = run_ranks(RANKS, cancelled_late, tiny_plan(tiny, "sp3"), file, write["video"])
    os.close(file)
    assert {end for end, _ in ends} == {"Stop "}
    assert len({checks for _, checks in ends}) == 1


class SlowDisk(Agreed):
    """The cancel comes after `at` tensors of the slow rank."""

    def __init__(self, page: StopPage, at: int) -> None:
        super().__init__(page)
        self.at = at

    def check(self) -> None:
        time.sleep(0.01)
        if self.checks == self.at:
            self.page.request_stop(1)
        super().check()


def cancelled_load(rank: int, plan: Plan, file: int) -> tuple[str, int]:
    page = StopPage(file, 2, rank)
    events = SlowDisk(page, 5) if rank else Agreed(page)
    engine = rank_engine(plan, rank)
    return outcome(engine, "load", {"stages": ["preview"]}, events), events.checks


def test_a_cancel_in_loading_does_not_wait_for_the_slowest_disk(tiny: Path) -> None:
    file = anonymous_file()
    (first, passed), (second, others) = run_ranks(2, cancelled_load, tiny_plan(tiny, "sp2"), file)
    os.close(file)
    assert (first, second) == ("Stop ", "Stop ")
    assert passed == others <= 5 + TENSORS_APART < tensors(tiny)


def tensors(tiny: Path) -> int:
    return len(tiny_engine(tiny).folder.preview().table)


# ---- what fails on the first rank alone


def no_space(writer: VideoWriter, pixels: torch.Tensor) -> None:
    writer.frames += 1
    if writer.frames > 40:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def disk_is_full() -> None:
    VideoWriter._write_frame = no_space  # type: ignore[method-assign]


def disk_is_full_at_the_end() -> None:
    def replace(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    os.replace = replace


def no_pyav() -> None:
    sys.modules["av"] = None  # type: ignore[assignment]


def no_encoder() -> None:
    from magi2_native.magi2_core.codecs import media

    media.ENCODER = "libx999"


def failing(
    rank: int, plan: Plan, arguments: dict[str, Any], fail: Callable[[], None] | None
) -> tuple[str, int, str, int]:
    """How the call ends on this rank, and then how a decode does."""
    if rank == 0 and fail is not None:
        fail()
    engine, page = rank_engine(plan, rank, "video_decoder"), StopPage(anonymous_file(), RANKS, rank)
    first, second = Agreed(page), Agreed(page)
    end = outcome(engine, "write_clip", arguments, first)
    return end, first.checks, outcome(engine, "decode_video", {"video": arguments["video"]}, second), second.checks


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        (disk_is_full, "Magi2Error The video could not be written to .*: .*No space left on device"),
        (disk_is_full_at_the_end, "Magi2Error The video could not be written to .*: .*quota exceeded"),
        (no_pyav, "MissingDependencyError Writing a video needs the package av"),
        (no_encoder, r"MissingDependencyError .*encoder libx999; .*pip install"),
    ],
)
def test_what_fails_on_the_first_rank_alone_ends_the_call_alike_on_all(
    tiny: Path, write: dict[str, Any], fail: Callable[[], None], sentence: str
) -> None:
    """Otherwise the others would wait for it, and the workers be ended."""
    ends = run_ranks(RANKS, failing, tiny_plan(tiny, "sp3"), write, fail)
    assert len(set(ends)) == 1, "ends and check points that the ranks do not share"
    assert re.match(sentence, ends[0][0])
    assert ends[0][2] == "done", "what was told and not heard, or heard and not told, spoils the next call"
    assert not list(Path(write["path"]).parent.iterdir())


@pytest.mark.parametrize("fps", ["25 fps", "1/0", "0", "-25", ""])
def test_a_frame_rate_that_is_none_is_refused_by_every_rank_itself(
    tiny: Path, write: dict[str, Any], fps: str
) -> None:
    with pytest.raises(RequestError, match=r"frame rate is .* write frames per second"):
        tiny_engine(tiny).run("write_clip", {**write, "fps": fps}, Silent())


# ---- devices of unequal memory


def with_budget(rank: int, plan: Plan, video: torch.Tensor, budgets: list[int]) -> tuple[str, int]:
    module.working_budget = lambda device: budgets[rank]
    events = Agreed(StopPage(anonymous_file(), RANKS, rank))
    return outcome(rank_engine(plan, rank, "video_decoder"), "decode_video", {"video": video}, events), events.checks


def test_the_smallest_device_decides_the_tiles_of_all(tiny: Path, write: dict[str, Any]) -> None:
    plan, config = tiny_plan(tiny, "sp3"), tiny_engine(tiny).folder.turbo_config()
    half = tile_bytes(config, 2, 4, 2, torch.bfloat16)
    large, small = (
        run_ranks(RANKS, with_budget, plan, write["video"], [1 << 30, each, 1 << 30]) for each in (1 << 30, half)
    )
    assert len(set(large)) == len(set(small)) == 1
    assert small[0] == ("done", small[0][1])
    assert small[0][1] > large[0][1], "there were no more tiles"


def test_a_device_on_which_nothing_can_be_decoded_is_refused_by_all_in_the_same_words(
    tiny: Path, write: dict[str, Any]
) -> None:
    ends = run_ranks(RANKS, with_budget, tiny_plan(tiny, "sp3"), write["video"], [1 << 30, 1 << 10, 1 << 30])
    assert len(set(ends)) == 1
    assert re.match(r"RequestError Decoding a frame of 64x32 needs at least .* but only 0 MiB are allowed", ends[0][0])
