"""The component profiler runs the model's own layer, names every part of it, and reports the slowest rank."""

from __future__ import annotations

import json
import time

import pytest
import torch
from magi2_native.benchmarks import moe_layer
from magi2_native.benchmarks.moe_layer import COMPONENTS, Component, Line, Options, Watch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.magi2_core.dit import attention, mlp, model
from magi2_native.tests.parallel_model import CONFIG, SHOTS, build, packed
from magi2_native.tests.ranks import run_ranks
from torch import Tensor


def measured(rank: int, layout: ParallelLayout) -> list[Line]:
    return moe_layer.measure(rank, Options(layout, tokens=64, rounds=3, warm_up=1))


@pytest.mark.parametrize("text", ["sp2", "tp2"])
def test_every_component_of_the_layer_is_seen_under_a_layout(text: str) -> None:
    layout = ParallelLayout.parse(text)
    first, *others = run_ranks(layout.world, measured, layout)
    assert all(lines == first for lines in others)
    times = {(line.part, line.component): line for line in first}
    absent = {name for name, line in times.items() if line.most == 0}
    # 10 §11.2: under tensor parallelism the MoE heads are there already
    assert absent == ({("MoE", "dispatch"), ("MoE", "undispatch")} if layout.tp > 1 else set())
    assert all(line.least <= line.median <= line.most for line in first)
    assert sum(line.share for line in first) == pytest.approx(1)


def run_layer() -> Tensor:
    transformer = build(ParallelContext.single())
    layout, _ = packed(SHOTS["text_to_clip"])
    prepared = transformer.prepare(layout, "cpu")
    streams_SW = torch.linspace(-1, 1, layout.tokens * CONFIG.stream_width).view(layout.tokens, -1)
    layer, watch = transformer.block.layers[1], Watch(torch.device("cpu"))
    with torch.inference_mode(), moe_layer.watched(layer, watch):
        layer(streams_SW, prepared)
        watch.start(None)
    assert {component for component, _ in watch.notes} == {None, *COMPONENTS}
    return streams_SW


def test_watching_a_layer_changes_neither_its_result_nor_the_model() -> None:
    before = [vars(module).copy() for module in (attention, mlp, model)]
    watched = run_layer()
    assert [vars(module) for module in (attention, mlp, model)] == before
    transformer = build(ParallelContext.single())
    layout, _ = packed(SHOTS["text_to_clip"])
    streams_SW = torch.linspace(-1, 1, layout.tokens * CONFIG.stream_width).view(layout.tokens, -1)
    with torch.inference_mode():
        transformer.block.layers[1](streams_SW, transformer.prepare(layout, "cpu"))
    assert torch.equal(streams_SW, watched)


def test_a_weight_that_no_component_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(moe_layer._WEIGHTS, "mlp.merge_linear")
    with pytest.raises(KeyError, match=r"mlp\.merge_linear"):
        run_layer()


def test_time_belongs_to_the_component_that_started_last() -> None:
    watch = Watch(torch.device("cpu"))
    watch.start(("MoE", "split"))
    watch.start(("MoE", "experts"))
    time.sleep(0.02)
    watch.start(("MoE", "split"))
    time.sleep(0.01)
    watch.start(None)
    times = watch.milliseconds()
    assert times["MoE", "experts"] >= 20
    assert times["MoE", "split"] >= 10
    assert sum(times.values()) == times["MoE", "experts"] + times["MoE", "split"]
    assert set(watch.milliseconds().values()) == {0.0}


def slowest_of(rank: int) -> list[dict[Component, float]]:
    own: list[dict[Component, float]] = [dict.fromkeys(COMPONENTS, 0.0) for _ in range(2)]
    own[rank]["MoE", "experts"] = 5.0
    own[0]["MoE", "merge"] = float(rank)
    return moe_layer.slowest(own, 2)


def test_each_round_counts_the_rank_that_took_longest() -> None:
    for rounds in run_ranks(2, slowest_of):
        assert [times["MoE", "experts"] for times in rounds] == [5.0, 5.0]
        assert [times["MoE", "merge"] for times in rounds] == [1.0, 0.0]


def test_the_table_leaves_out_what_did_not_run_and_sums_each_part() -> None:
    lines = [Line("MoE", "experts", 3.0, 2.0, 4.0, 0.75), Line("MoE", "merge", 1.0, 1.0, 1.0, 0.25),
             Line("MoE", "reduce", 0.0, 0.0, 0.0, 0.0)]  # fmt: skip
    text = moe_layer.table(lines)
    assert "reduce" not in text
    assert [word for word in text.splitlines()[-1].split() if word[0].isdigit()] == ["4.000", "100.0%"]


def test_the_command_measures_in_processes_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layout", "sp2", "--tokens", "64", "--rounds", "2", "--device", "cpu", "--json"]
    assert moe_layer.main(arguments) == 0
    lines = json.loads(capsys.readouterr().out)
    assert {(line["part"], line["component"]) for line in lines} == set(COMPONENTS)


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--layout", "sp5"], "sp5 does not divide the 24 attention heads"),
    (["--layout", "fast"], "'fast' is not a layout"),
    (["--tokens", "3"], "at least 16 tokens"),
])  # fmt: skip
def test_the_command_refuses_what_it_cannot_measure(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        moe_layer.main([*arguments, "--device", "cpu"])
    assert sentence in capsys.readouterr().err
