"""The engine on several ranks gives what one rank gives: latents within rounding, frames to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.magi2_core.engine import make_engine
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.memory.plan import Plan
from magi2_native.tests.miniatures import Encoded, Listener, difference, tiny_engine, tiny_plan
from magi2_native.tests.ranks import run_ranks

Calls = list[tuple[str, dict[str, Any]]]
TOLERANCE = 1e-5  # relative L2, with everything in fp32


@pytest.fixture(scope="module")
def calls(tiny: Path, encoded: Encoded) -> Calls:
    """A clip: sampled, refined, decoded."""
    arguments = encoded.sample(picture=True)
    latent = tiny_engine(tiny).run("sample", arguments, Silent())
    return [("sample", arguments), ("refine", encoded.refine(latent)), ("decode_video", {"video": latent["video"]})]


@pytest.fixture(scope="module")
def alone(tiny: Path, calls: Calls) -> list[dict[str, Any]]:
    """What one rank makes of it."""
    engine = tiny_engine(tiny)
    return [engine.run(*call, Silent()) for call in calls]


def on_rank(rank: int, plan: Plan, calls: Calls) -> tuple[list[dict[str, Any]], list[int]]:
    """The results of the calls, and how many check points each of them passed."""
    engine = make_engine(plan.to_dict(), ParallelContext.create(plan.parallel, rank))
    results, checks = [], []
    for call in calls:
        listener = Listener()
        results.append(engine.run(*call, listener))
        checks.append(listener.checks)
    return results, checks


@pytest.mark.parametrize("layout", ["sp2", "sp3", "sp4", "cfg2", "tp2", "cfg2sp2", "tp2sp2"])
def test_every_layout_gives_what_one_rank_gives(
    tiny: Path, calls: Calls, alone: list[dict[str, Any]], layout: str
) -> None:
    plan = tiny_plan(tiny, layout)
    ranks = run_ranks(plan.parallel.world, on_rank, plan, calls)
    sampled, refined, decoded = ranks[0][0]
    for name in ("video", "audio"):
        assert difference(sampled[name], alone[0][name]) <= TOLERANCE
    assert difference(refined["video"], alone[1]["video"]) <= TOLERANCE
    assert torch.equal(decoded["frames"], alone[2]["frames"])
    assert [results[2] for results, _ in ranks[1:]] == [{}] * (plan.parallel.world - 1), "frames go to the first rank"
    assert len({tuple(checks) for _, checks in ranks}) == 1, "check points that the ranks do not share"


def test_the_windows_of_the_video_decoder_are_divided(tiny: Path, calls: Calls) -> None:
    """Five windows on three ranks: none decodes more than two."""
    counts = run_ranks(3, windows_of_rank, tiny_plan(tiny, "sp3"), calls[2:])
    assert sorted(counts) == [1, 2, 2]


def windows_of_rank(rank: int, plan: Plan, calls: Calls) -> int:
    from magi2_native.magi2_core import engine as module

    counted, original = [], module.decode_window
    module.decode_window = lambda *arguments: counted.append(1) or original(*arguments)  # type: ignore[attr-defined]
    on_rank(rank, plan, calls)
    return len(counted)


def test_a_clip_written_by_two_ranks_is_the_file_that_one_writes(tiny: Path, calls: Calls, tmp_path: Path) -> None:
    arguments = {
        "video": calls[2][1]["video"], "waveform": torch.zeros(2, 441_000), "sample_rate": 44_100, "crf": 10,
        "fps": "25/2", "size": (48, 30),
    }  # fmt: skip
    plan, files = tiny_plan(tiny, "sp2"), [tmp_path / "two.mp4", tmp_path / "one.mp4"]
    run_ranks(2, on_rank, plan, [("write_clip", {**arguments, "path": str(files[0])})])
    tiny_engine(tiny).run("write_clip", {**arguments, "path": str(files[1])}, Silent())
    assert files[0].read_bytes() == files[1].read_bytes()
    facts = read_back(files[0])
    assert (facts.frames, facts.width, facts.height, facts.samples) == (125, 48, 30, 441_000)


def test_the_other_ranks_need_no_folder_of_the_clip(tiny: Path, calls: Calls, tmp_path: Path) -> None:
    """They may be on another host."""
    arguments = {"video": calls[2][1]["video"], "waveform": None, "sample_rate": 44_100, "crf": 10, "fps": "25/2"}
    file = tmp_path / "clip.mp4"
    run_ranks(2, on_rank_of_another_host, tiny_plan(tiny, "sp2"), [("write_clip", {**arguments, "path": str(file)})])
    assert read_back(file).frames == 125


def on_rank_of_another_host(rank: int, plan: Plan, calls: Calls) -> None:
    if rank:
        for _, arguments in calls:
            arguments["path"] = "/folder/of/another/host/clip.mp4"
    on_rank(rank, plan, calls)


def test_a_file_that_cannot_be_written_is_refused_by_all_ranks_alike(tiny: Path, calls: Calls, tmp_path: Path) -> None:
    """One rank refusing alone would leave the others in a hand-over."""
    arguments = {
        "video": calls[2][1]["video"], "waveform": torch.zeros(2, 9), "sample_rate": 44_100, "crf": 10, "fps": "25/2",
        "path": str(tmp_path / "gone" / "clip.mp4"),
    }  # fmt: skip
    sentences = run_ranks(2, refusal_of_rank, tiny_plan(tiny, "sp2"), [("write_clip", arguments)])
    assert sentences[0] == sentences[1]
    assert "does not exist" in sentences[0]


def refusal_of_rank(rank: int, plan: Plan, calls: Calls) -> str:
    with pytest.raises(RequestError, match="gone") as caught:
        on_rank(rank, plan, calls)
    return str(caught.value)


def test_ranks_that_swap_hold_the_same_after_a_call_of_one_rank(tiny: Path, encoded: Encoded, calls: Calls) -> None:
    """A prompt and a sound are made on one rank; the model that they displace comes back on all ranks together."""
    sound = ("decode_audio", {"audio": torch.zeros(250, 64)})
    order = [calls[0], sound, calls[0], calls[2], calls[0]]
    (_, first), (_, second) = run_ranks(2, on_rank, tiny_plan(tiny, "sp2", residency="swap"), order)
    assert first[2] == first[0], "the sound did not displace the model"
    del first[1], second[1]
    assert first == second
