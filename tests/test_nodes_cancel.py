"""Cancel and failure: the interrupt passes untouched, workers stop, and the next run just works (60 §4, 80)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in


@pytest.fixture(params=[Exception, BaseException], ids=["interrupt-is-Exception", "interrupt-is-BaseException"])
def graph(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path, request.param) as graph:
        yield graph


def run_stage(graph: Graph, stage: str, prepared: dict[str, Any]) -> Any:
    match stage:
        case "encode_text":
            return graph.conditioning("something new")
        case "encode_image" | "sample":
            return graph.run("Magi2Sampler", **prepared["sampler"])
        case _:
            return graph.run("Magi2Decode", model=prepared["sampler"]["model"], latent=prepared["latent"])


@pytest.fixture
def prepared(graph: Graph) -> dict[str, Any]:
    inputs = graph.sampler_inputs()
    inputs["conditioning"] = graph.run(
        "Magi2ImageConditioning", conditioning=inputs["conditioning"], image=torch.rand(1, 8, 8, 3)
    )
    return {"sampler": inputs, "latent": graph.run("Magi2Sampler", **inputs)}


@pytest.mark.parametrize("stage", ["encode_text", "encode_image", "sample", "decode_video", "decode_audio"])
def test_cancel_in_any_stage_stops_the_job_and_reaches_comfyui_as_it_was(
    graph: Graph, prepared: dict[str, Any], stage: str
) -> None:
    interrupt = graph.stub.model_management.InterruptProcessingException
    pool = graph.pools[-1]
    pool.on_call = lambda call: graph.stub.model_management.interrupt_current_processing(call == stage)
    with pytest.raises(interrupt) as caught:
        run_stage(graph, stage, prepared)
    assert type(caught.value) is interrupt
    assert pool.cancelled == [stage]
    assert pool.alive, "a cancelled job does not cost the workers"
    pool.on_call = lambda call: None
    assert run_stage(graph, stage, prepared) is not None
    assert len(graph.pools) == 1


def test_cancel_reaches_a_stage_that_reports_nothing(graph: Graph, prepared: dict[str, Any]) -> None:
    pool = graph.pools[-1]
    pool.silent = True
    pool.on_call = lambda call: graph.stub.model_management.interrupt_current_processing(True)
    with pytest.raises(graph.stub.model_management.InterruptProcessingException):
        graph.run("Magi2Sampler", **prepared["sampler"])
    assert pool.cancelled


def test_cancel_while_workers_start_ends_them(graph: Graph) -> None:
    model = graph.model()
    graph.stub.model_management.interrupt_current_processing(True)
    with pytest.raises(graph.stub.model_management.InterruptProcessingException):
        graph.run("Magi2EncodePrompt", model=model, prompt="a", negative_prompt="b")
    assert graph.pools[0].closed == 1
    assert not graph.manager.alive
    graph.run("Magi2EncodePrompt", model=model, prompt="a", negative_prompt="b")
    assert len(graph.pools) == 2


def test_a_dead_worker_is_reported_and_the_next_run_starts_new_ones(graph: Graph, prepared: dict[str, Any]) -> None:
    graph.pools[-1].die = True
    with pytest.raises(RuntimeError, match="SIGKILL"):
        graph.run("Magi2Sampler", **prepared["sampler"])
    again = graph.run("Magi2Sampler", **prepared["sampler"])
    assert len(graph.pools) == 2
    assert graph.pools[0].closed == 1
    assert torch.equal(again["video"], prepared["latent"]["video"])


def test_workers_that_do_not_join_leave_nothing_behind(graph: Graph) -> None:
    model = graph.model()
    graph.refuse_start = True
    with pytest.raises(RuntimeError, match="did not join"):
        graph.run("Magi2EncodePrompt", model=model, prompt="a", negative_prompt="b")
    assert graph.pools[0].closed == 1
    assert graph.manager.status()["state"] == "stopped"
    graph.refuse_start = False
    graph.run("Magi2EncodePrompt", model=model, prompt="a", negative_prompt="b")


def test_another_model_replaces_the_pool_and_the_same_one_keeps_it(graph: Graph) -> None:
    graph.conditioning("one")
    graph.conditioning("two")
    assert len(graph.pools) == 1
    other = graph.model(devices="cpu")
    graph.run("Magi2EncodePrompt", model=other, prompt="three", negative_prompt="")
    assert len(graph.pools) == 2
    assert graph.pools[0].closed == 1
