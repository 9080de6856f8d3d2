"""ComfyUI's memory manager reaches the workers: /free, pressure from other models, room before a start (60 §5)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.tests.comfy_stub.fixtures import Graph, graph_in

PRESSURE = 20e9


@pytest.fixture
def graph(tmp_path: Path) -> Iterator[Graph]:
    with graph_in(tmp_path) as graph:
        yield graph


def bridge(graph: Graph) -> Any:
    return graph.manager.before_start.__self__


def listed(graph: Graph) -> int:
    return len(graph.stub.model_management.current_loaded_models)


def test_workers_are_listed_in_the_thread_of_their_first_job(graph: Graph) -> None:
    """Listing may move ComfyUI's own models, which a start from the page must not do while nodes run."""
    graph.conditioning()
    graph.manager.stop()
    graph.stub.model_management.unload_all_models()
    graph.manager.start()
    assert (graph.manager.alive, listed(graph)) == (True, 0)
    graph.conditioning("again")
    graph.conditioning("and again")
    assert listed(graph) == 1


def test_an_explicit_unload_ends_the_workers_and_the_next_run_starts_them_again(graph: Graph) -> None:
    graph.conditioning()
    assert listed(graph) == 1
    graph.stub.model_management.unload_all_models()
    assert not graph.manager.alive
    graph.conditioning("again")
    assert graph.manager.alive
    assert listed(graph) == 1


@pytest.mark.parametrize(("give_up", "left"), [("never", True), ("when asked", True), ("always", False)])
def test_another_model_that_needs_room_gets_it_only_if_the_user_said_so(
    graph: Graph, give_up: str, left: bool
) -> None:
    graph.conditioning()
    bridge(graph).give_up = give_up
    graph.stub.model_management.free_memory(PRESSURE, torch.device("cpu"))
    assert graph.manager.alive == left


def test_never_means_never(graph: Graph) -> None:
    graph.conditioning()
    bridge(graph).give_up = "never"
    graph.stub.model_management.unload_all_models()
    assert graph.manager.alive


def test_replacing_the_entry_in_comfyuis_list_does_not_end_the_workers(graph: Graph) -> None:
    graph.conditioning()
    (entry,) = graph.stub.model_management.current_loaded_models
    entry.detach(unpatch_all=False)
    assert graph.manager.alive


def test_a_memory_manager_that_has_changed_costs_one_log_line(graph: Graph, caplog: pytest.LogCaptureFixture) -> None:
    def changed(*_: Any) -> None:
        raise TypeError("load_models_gpu() takes 0 positional arguments")

    graph.stub.model_management.load_models_gpu = changed
    graph.conditioning()
    graph.manager.stop()
    graph.conditioning("again")
    warnings = [record for record in caplog.records if "memory manager" in record.message]
    assert len(warnings) == 1


def test_comfyuis_models_leave_the_gpus_before_the_workers_come(graph: Graph) -> None:
    model = graph.model()
    bridge(graph).before_start(model)
    assert graph.stub.model_management.unloaded_all == 0, "not for workers on the CPU"
    values = graph.stub.module("stages.values")
    plan_module = graph.stub.module("magi2_core.memory.plan")
    plan = plan_module.Plan("x", "sp1", "bfloat16", "keep", "float32", (plan_module.RankPlan("cuda:0", 1, 1, 1),))
    bridge(graph).before_start(values.Model("gpu", plan, ()))
    assert graph.stub.model_management.unloaded_all == 1
