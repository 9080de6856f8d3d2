"""The plan: how a checkpoint divides over this machine's devices, and whether it fits (80 line 12)."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.distributed.layout import LayoutError
from magi2_native.magi2_core.errors import CheckpointError, RequestError
from magi2_native.magi2_core.memory import machine
from magi2_native.magi2_core.memory import plan as plan_module
from magi2_native.magi2_core.memory.machine import Place
from magi2_native.magi2_core.memory.plan import HEADROOM, Plan, RankPlan, make_plan
from magi2_native.magi2_core.memory.table import plan_table

GB = 10**9


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without architecture files: the released architecture, and a refiner that it may hold."""
    folder = tmp_path_factory.mktemp("released")
    (folder / "refiner").mkdir()
    return folder


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that there are GPUs of so many GB."""

    def pretend(*sizes: int) -> None:
        memory = {f"cuda:{i}": size * GB for i, size in enumerate(sizes)} | {"cpu": 64 * GB}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
        monkeypatch.setattr(plan_module, "device_memory", memory.__getitem__)

    return pretend


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8])
def test_the_automatic_layout_divides_the_sequence_over_all_devices(tiny: Path, devices: int) -> None:
    plan = make_plan(tiny, devices=["cpu"] * devices)
    assert plan.layout == f"sp{devices}"
    assert plan.devices == ("cpu",) * devices


@pytest.mark.parametrize(("devices", "counts"), [(5, "1, 2, 3, 4"), (7, "1, 2, 3, 4, 6")])
def test_devices_that_cannot_all_be_used_are_refused_with_what_can(tiny: Path, devices: int, counts: str) -> None:
    with pytest.raises(RequestError, match=f"^{devices} devices are asked for, .* over {counts} of them"):
        make_plan(tiny, devices=["cpu"] * devices)


def test_of_five_gpus_that_nobody_asked_for_four_are_used(released: Path, gpus: Any) -> None:
    gpus(80, 80, 80, 80, 80)
    assert make_plan(released).devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")


def test_a_smaller_layout_takes_the_first_devices(tiny: Path) -> None:
    assert make_plan(tiny, layout="tp2", devices=["cpu"] * 4).devices == ("cpu", "cpu")


def test_without_a_gpu_there_is_one_rank_on_the_cpu(tiny: Path, gpus: Any) -> None:
    gpus()
    assert make_plan(tiny).devices == ("cpu",)


@pytest.mark.parametrize(
    ("layout", "devices", "sentence"),
    [
        ("sp5", 5, "sp5 does not divide the 24 attention heads. .* sp 1, 2, 3, 4"),
        ("sp4", 2, "needs 4 devices and 2 are there. .* sp 1, 2"),
        ("tp5", 5, "tp5 does not divide the 24 attention heads"),
        ("three", 2, "'three' is not a layout; write for example sp4"),
        ("cfg3", 3, "cfg is 3; it must be 1 or 2"),
        ("dp2sp2", 4, "dp2sp2 makes 2 clips side by side, but clips are made one after the other; use sp2, or"),
    ],
)
def test_an_illegal_layout_is_refused_with_the_legal_ones(
    tiny: Path, layout: str, devices: int, sentence: str
) -> None:
    with pytest.raises(LayoutError, match=sentence):
        make_plan(tiny, layout=layout, devices=["cpu"] * devices)


@pytest.mark.parametrize(
    ("devices", "sentence"),
    [
        (["cuda:2"], r"'cuda:2' is not here; this process sees cuda:0, cuda:1, cpu \(CUDA_VISIBLE_DEVICES=4,3\)"),
        (["cuda:0", "cuda:0"], "'cuda:0' is asked for twice"),
        (["gpu"], "'gpu' is not here"),
        ([], "device list is empty"),
    ],
)
def test_devices_that_are_not_there_are_refused_with_those_that_are(
    tiny: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch, devices: list[str], sentence: str
) -> None:
    gpus(80, 80)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,3")
    with pytest.raises(RequestError, match=sentence):
        make_plan(tiny, devices=devices)


@pytest.mark.parametrize("option", ["dtype", "residency", "refiner_residual"])
def test_an_unknown_option_is_refused_with_the_known_ones(tiny: Path, option: str) -> None:
    with pytest.raises(RequestError, match=f"{option} is 'half'; it must be one of"):
        make_plan(tiny, devices=["cpu"], **{option: "half"})


# ---- workers that run already, on several hosts


def places(*memory: int) -> list[Place]:
    """Two GPUs on each host."""
    return [Place(f"cuda:{i % 2}", size * GB, f"host{i // 2}") for i, size in enumerate(memory)]


def test_workers_of_other_hosts_are_planned_by_what_they_say_of_themselves(released: Path, gpus: Any) -> None:
    gpus()
    plan = make_plan(released, places=places(80, 80, 80, 80))
    assert (plan.layout, plan.shortage) == ("sp4", None)
    assert plan.devices == ("cuda:0", "cuda:1", "cuda:0", "cuda:1")
    assert "rank 3 on cuda:1 of host1: 64.9 GB weights" in plan.describe()
    assert Plan.from_dict(plan.to_dict()) == plan
    small = make_plan(released, places=places(80, 80, 80, 40))
    assert small.shortage is not None
    assert "on cuda:1 of host1 and 40.0 GB are there" in small.shortage
    assert "cuda:1 of host1 has 40.0 GB and cuda:0 of host0 has 80.0 GB" in small.describe()


@pytest.mark.parametrize(("layout", "takes"), [("sp2", "sp2 takes 2"), ("auto", "sp4 takes 4")])
def test_a_layout_that_leaves_running_workers_out_is_refused(tiny: Path, layout: str, takes: str) -> None:
    with pytest.raises(RequestError, match=f"5 workers run, but layout {takes}; .* sp takes 1, 2, 3, 4 of them"):
        make_plan(tiny, layout=layout, places=[Place("cpu", GB, "a")] * 5)
    with pytest.raises(LayoutError, match="needs 6 devices and 5 are there"):
        make_plan(tiny, layout="sp6", places=[Place("cpu", GB, "a")] * 5)


def test_workers_on_the_cpu_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: 64 * GB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert Place(**machine.describe_place(torch.device("cpu"))) == Place("cpu", 16 * GB)


def test_a_missing_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone does not exist"):
        make_plan(tmp_path / "gone")


def test_a_shortage_names_what_is_needed_and_what_is_there(released: Path, gpus: Any) -> None:
    gpus(80, 80)
    plan = make_plan(released)
    assert plan.shortage is not None
    needed = plan.ranks[0].needed
    assert needed == plan.ranks[0].weights + plan.ranks[0].working + HEADROOM
    assert plan.shortage.startswith(f"Rank 0 needs {needed / GB:.1f} GB on cuda:0 and 80.0 GB are there.")
    assert plan.shortage in plan.describe()


def test_the_released_model_fits_eight_cards_of_80_gb_and_not_four_of_64(released: Path, gpus: Any) -> None:
    gpus(*[80] * 8)
    eight = make_plan(released)
    assert eight.shortage is None
    assert "This fits." in eight.describe()
    gpus(*[64] * 4)
    assert make_plan(released).shortage


def test_of_unequal_devices_the_smaller_decides_and_both_are_named(released: Path, gpus: Any) -> None:
    gpus(80, 80, 80, 48, 80, 80, 80, 40)
    plan = make_plan(released)
    assert plan.shortage is not None
    assert "on cuda:7 and 40.0 GB are there" in plan.shortage
    assert "cuda:7 has 40.0 GB and cuda:0 has 80.0 GB" in plan.describe()
    gpus(80, 80)
    assert make_plan(released).difference is None


def test_cpu_ranks_share_the_hosts_memory(tiny: Path, gpus: Any) -> None:
    gpus()
    assert [rank.memory for rank in make_plan(tiny, devices=["cpu"] * 4).ranks] == [16 * GB] * 4


@pytest.mark.parametrize(("size", "residency"), [(45, "swap"), (48, "swap"), (141, "keep")])
def test_networks_are_kept_only_where_all_of_them_fit(
    released: Path, gpus: Any, size: int, residency: str
) -> None:
    """The refiner's 13.5 GB decide: at 48 GB the transformer fits beside the small networks only."""
    gpus(*[size] * 8)
    plan = make_plan(released)
    assert plan.shortage is None
    assert plan.residency == residency


def test_without_a_refiner_less_memory_keeps_all(tmp_path: Path, released: Path, gpus: Any) -> None:
    gpus(*[48] * 8)
    assert (make_plan(tmp_path).residency, make_plan(released).residency) == ("keep", "swap")


def test_what_the_user_says_about_residency_stands(tiny: Path) -> None:
    for residency in ("keep", "swap"):
        assert make_plan(tiny, devices=["cpu"], residency=residency).residency == residency


def test_a_plan_crosses_as_builtins_and_comes_back(tiny: Path) -> None:
    plan = make_plan(tiny, devices=["cpu", "cpu"], dtype="float32", residency="swap", refiner_residual="bfloat16")
    data = plan.to_dict()
    assert set(data) == {field.name for field in fields(Plan)}

    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str and plain(each) for key, each in value.items())
        return all(map(plain, value)) if type(value) in (tuple, list) else type(value) in (str, int)

    assert plain(data)
    assert Plan.from_dict(data) == plan
    assert (plan.compute_dtype, plan.refiner_residual_dtype) == (torch.float32, torch.bfloat16)


def test_the_bytes_of_a_rank_are_the_published_ones(released: Path) -> None:
    """70 §5: bytes per rank in bf16."""
    published = {"sp1": 228.1, "sp2": 119.3, "sp3": 83.1, "sp4": 64.9, "sp8": 37.8, "tp2sp2": 114.2, "tp4": 57.3}
    for layout, gigabytes in published.items():
        plan = make_plan(released, layout=layout, devices=["cpu"] * 8)
        assert max(rank.weights for rank in plan.ranks) / GB == pytest.approx(gigabytes, abs=0.051)


def test_the_table_of_a_resolution_has_both_stages_of_1080p(released: Path) -> None:
    rows = plan_table(released, "1080p")
    assert [(row.stage, row.layout) for row in rows] == [
        (stage, layout) for stage in ("preview", "refiner") for layout in ("sp1", "sp2", "sp4", "sp8")
    ]
    assert rows[0].weights == 228_107_858_176
    assert all(row.peak > row.weights for row in rows)
    assert [row.stage for row in plan_table(released, "540p")] == ["preview"] * 4
    small, large = plan_table(released, "272p")[0], plan_table(released, "540p")[0]
    assert small.weights == large.weights
    assert small.peak < large.peak


def test_the_hosts_memory_is_the_containers_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    physical = machine.host_memory()
    assert physical > 0
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (str(tmp_path / "absent"), str(limit)))
    for text, expected in (("max\n", None), ("1000000\n", 1_000_000)):
        limit.write_text(text)
        assert machine.host_memory() == (expected or machine.physical_memory())


def test_a_rank_needs_its_weights_its_work_and_headroom() -> None:
    rank = RankPlan("cpu", 5, 7, 100)
    assert rank.needed == 12 + HEADROOM
    assert replace(rank, weights=6).needed == rank.needed + 1
