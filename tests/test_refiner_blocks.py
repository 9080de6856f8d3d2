"""Blocks, their order, and who sees whom (50 §5, §6, §7)."""

from itertools import product

import pytest
import torch
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.refiner.blocks import WindowSettings, plan_blocks
from magi2_native.tests.refiner_models import attended_pairs

SHIPPED = WindowSettings()


def test_the_full_size_has_the_stated_counts() -> None:
    plan = plan_blocks((63, 68, 120), 2048, SHIPPED)
    assert (plan.video, plan.tokens, plan.blocks, plan.largest) == (514_080, 516_128, 4080, 128)
    assert [len(axis) for axis in plan.windows] == [8, 17, 30]
    assert attended_pairs(plan) == 8_310_059_008
    # with one range for each block and tail, and two for each chunk of the tail, the reference lists 390 896
    block_pairs = sum(last - first for runs in plan.key_runs for first, last in runs)
    assert block_pairs + plan.blocks + 2 * (2048 // 128) == 390_896
    assert attended_pairs(plan) / plan.tokens**2 == pytest.approx(0.0312, abs=1e-4)


def test_portrait_has_the_same_counts() -> None:
    landscape, portrait = (plan_blocks(grid, 100, SHIPPED) for grid in ((63, 68, 120), (63, 120, 68)))
    assert (landscape.blocks, attended_pairs(landscape)) == (portrait.blocks, attended_pairs(portrait))


def test_blocks_follow_each_other_in_raster_order_and_so_do_the_tokens_inside() -> None:
    plan = plan_blocks((3, 2, 5), 0, WindowSettings(block=(2, 2, 2)))
    order = plan.order().tolist()
    expected = []
    for bt, bh, bw in product(range(2), range(1), range(3)):
        for t, h, w in product(range(3), range(2), range(5)):
            if (t // 2, h // 2, w // 2) == (bt, bh, bw):
                expected.append((t * 2 + h) * 5 + w)
    assert order == expected
    assert plan.starts == (0, 8, 16, 20, 24, 28, 30)


@pytest.mark.parametrize(
    ("grid", "tail", "settings"),
    [
        ((5, 6, 7), 9, WindowSettings(block=(2, 2, 2), radius=(1, 1, 1))),
        ((9, 9, 10), 3, SHIPPED),
        ((4, 5, 3), 0, WindowSettings(block=(3, 2, 2), radius=(1, 0, 1))),
        ((17, 5, 2), 2, WindowSettings(block=(2, 2, 2), radius=(2, 1, 0))),
    ],
)
def test_the_mask_is_the_definition(grid: tuple[int, int, int], tail: int, settings: WindowSettings) -> None:
    plan = plan_blocks(grid, tail, settings)
    places = torch.tensor(list(product(*map(range, grid))))[plan.order()] // torch.tensor(settings.block)
    near = ((places[:, None] - places).abs() <= torch.tensor(settings.radius)).all(-1)
    expected = torch.ones(plan.tokens, plan.tokens, dtype=torch.bool)
    expected[: plan.video, : plan.video] = near
    assert torch.equal(plan.mask(), expected)
    assert attended_pairs(plan) == int(expected.sum())


def test_runs_are_as_long_as_they_can_be() -> None:
    plan = plan_blocks((4, 4, 4), 0, WindowSettings(block=(2, 2, 2), radius=(1, 1, 1)))
    assert plan.key_runs == (((0, 8),),) * 8


def test_scanning_windows_stay_full_at_the_ends() -> None:
    plan = plan_blocks((2, 2, 12), 1, WindowSettings("scan", block=(2, 2, 2), win_size=4))
    assert plan.key_runs == (((0, 4),), ((0, 4),), ((0, 4),), ((1, 5),), ((2, 6),), ((2, 6),))


def test_a_scanning_window_wider_than_the_clip_sees_all_of_it() -> None:
    plan = plan_blocks((2, 2, 4), 0, WindowSettings("scan", block=(2, 2, 2), win_size=384))
    assert plan.key_runs == (((0, 2),), ((0, 2),))


@pytest.mark.parametrize(("reach", "seen"), [(0, [(2, 3)]), (1, [(1, 4)]), (-1, [(0, 5)])])
def test_frames_see_the_frames_around_them_in_raster_order(reach: int, seen: list[tuple[int, int]]) -> None:
    plan = plan_blocks((5, 2, 3), 4, WindowSettings("frame", frame_receptive_field=reach))
    assert plan.order().tolist() == list(range(30))
    assert plan.largest == 6
    assert list(plan.key_runs[2]) == seen


@pytest.mark.parametrize(
    "bad", [{"mode": "ring"}, {"block": (0, 4, 4)}, {"radius": (2, -1, 2)}, {"mode": "scan", "win_size": 0}]
)
def test_windows_that_cannot_be_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="window"):
        WindowSettings(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("grid", [(0, 4, 4), (4, 4, 0)])
def test_an_empty_video_is_refused(grid: tuple[int, int, int]) -> None:
    with pytest.raises(RequestError, match="video grid"):
        plan_blocks(grid, 5, SHIPPED)
