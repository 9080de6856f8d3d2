"""The predicted memory of the second stage against what a scaled run holds (50 §7)."""

from dataclasses import replace

import pytest
import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.magi2_core.config import RefinerConfig
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.refiner.memory import refiner_memory
from magi2_native.magi2_core.refiner.stage import RefinerSettings, model_evaluate, refine
from magi2_native.tests.ranks import run_ranks
from magi2_native.tests.refiner_models import make_refiner
from magi2_native.tests.storage_peak import StoragePeak

SCALED = RefinerConfig(
    num_layers=2, hidden_size=256, head_dim=32, num_query_groups=2, text_in_channels=128, mm_layers=(0,)
)
FRAMES, TEXT, SIZE = 5, 32, {"width": 320, "height": 256}


def measure(rank: int, world: int, dtype: torch.dtype, residual: torch.dtype) -> int:
    """Largest sum of the bytes alive on a rank, while it refines a clip in two steps."""
    parallel = ParallelContext.create(ParallelLayout(sp=world), rank) if world > 1 else None
    settings = RefinerSettings(**SIZE, steps=2)
    with StoragePeak() as storage, torch.inference_mode():
        model = make_refiner(SCALED, parallel, dtype, residual)
        storage.peak = 0  # the model is part of what is alive, making it is not
        video, prompt, negative = torch.randn(1, 48, FRAMES, 2, 2), torch.randn(TEXT, 128), torch.randn(TEXT, 128)
        evaluate = model_evaluate(model, settings, FRAMES, 0, prompt, negative, Silent())
        refine(settings, video, torch.zeros(1, 0, 64), evaluate, torch.randn, Silent())
    return storage.peak


@pytest.mark.parametrize(
    ("world", "dtype", "residual"),
    [
        (1, torch.bfloat16, torch.float32),
        (1, torch.bfloat16, torch.bfloat16),
        (1, torch.float32, torch.float32),
        (2, torch.bfloat16, torch.float32),
        (4, torch.bfloat16, torch.float32),  # more ranks than key heads: they are repeated
        (4, torch.float32, torch.float32),
    ],
)
def test_the_prediction_is_within_ten_percent_of_a_run(
    world: int, dtype: torch.dtype, residual: torch.dtype
) -> None:
    grid = RefinerSettings(**SIZE).grid(FRAMES)
    config = replace(SCALED, params_dtype=dtype)
    predicted = refiner_memory(config, grid, TEXT, world, device_type="cpu", residual=residual).peak
    if world == 1:
        measured = measure(0, 1, dtype, residual)
    else:
        measured = max(run_ranks(world, measure, world, dtype, residual))
    assert predicted == pytest.approx(measured, rel=0.10)


def test_the_real_size_matches_the_stated_tensors() -> None:
    gib = 2**30
    for ranks, residual, qkv in ((1, 7.88, 5.91), (4, 1.97, 1.48), (8, 0.98, 0.74)):
        tensors = refiner_memory(RefinerConfig(), (63, 68, 120), 2048, ranks).tensors
        assert tensors["residual"] / gib == pytest.approx(residual, abs=0.006)
        assert tensors["queries, keys, values"] / gib == pytest.approx(qkv, abs=0.006)
        assert tensors["weights"] == 13_484_611_648


def test_ranks_beyond_the_key_heads_exchange_repeated_ones() -> None:
    rows = 516_128 // 16
    tensors = refiner_memory(RefinerConfig(), (63, 68, 120), 2048, 16).tensors
    assert tensors["queries, keys, values"] == rows * (32 + 2 * 8) * 128 * 2
    assert tensors["sent and received"] == 2 * rows * (32 + 2 * 16) * 128 * 2


def test_more_ranks_and_a_bf16_residual_need_less() -> None:
    plan = {
        (ranks, dtype): refiner_memory(RefinerConfig(), (63, 68, 120), 2048, ranks, residual=dtype).peak
        for ranks in (1, 2, 4)
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert plan[1, torch.float32] < 32e9
    assert plan[4, torch.float32] < plan[2, torch.float32] < plan[1, torch.float32]
    assert all(plan[ranks, torch.bfloat16] < plan[ranks, torch.float32] for ranks in (1, 2, 4))
