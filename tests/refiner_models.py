"""Small refiners with random weights for the tests."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from magi2_native.distributed.exchange import ParallelContext
from magi2_native.magi2_core.config import RefinerConfig
from magi2_native.magi2_core.dit.rope import rotary_bands
from magi2_native.magi2_core.refiner.blocks import BlockPlan, WindowSettings
from magi2_native.magi2_core.refiner.model import RefinerTransformer
from torch import Tensor

# 8 query heads and 2 key heads; layers 0 and 2 have weights for each modality
CONFIG = RefinerConfig(
    num_layers=3,
    hidden_size=128,
    head_dim=16,
    num_query_groups=2,
    video_in_channels=12,
    audio_in_channels=16,
    text_in_channels=40,
    mm_layers=(0, 2),
)
WINDOW = WindowSettings(block=(2, 2, 2), radius=(1, 1, 1))
GRID = (5, 6, 7)


def attended_pairs(plan: BlockPlan) -> int:
    """Pairs of tokens of which the first sees the second (50 §7), for plans whose mask is too large."""
    starts = plan.starts
    seen = (sum(starts[last] - starts[first] for first, last in runs) for runs in plan.key_runs)
    inside = sum((stop - start) * rows for (start, stop), rows in zip(pairwise(starts), seen, strict=True))
    return inside + (2 * plan.video + plan.tail) * plan.tail


def make_refiner(
    config: RefinerConfig = CONFIG,
    parallel: ParallelContext | None = None,
    dtype: torch.dtype = torch.float32,
    residual: torch.dtype = torch.float32,
) -> RefinerTransformer:
    """A refiner whose weights depend on the config alone, not on the dtype or the layout."""
    model = RefinerTransformer(config, parallel, compute_dtype=dtype, residual=residual)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        value = torch.randn(parameter.shape, generator=generator)
        scale = 0.1 if "norm" in name or name.endswith("bias") else (parameter.shape[-1] ** -0.5)
        parameter.copy_(scale * value)
    model.pre_adapter.rope.bands.copy_(rotary_bands(config.head_dim))
    return model


def make_inputs(text: int = 11, audio: int = 0, config: RefinerConfig = CONFIG) -> tuple[Tensor, Tensor, Tensor]:
    """Video [1, C, t, h, w], sound [1, L, C] and text [L, C]."""
    generator = torch.Generator().manual_seed(text + audio)
    return (
        torch.randn(1, config.video_in_channels, *GRID, generator=generator),
        torch.randn(1, audio, config.audio_in_channels, generator=generator),
        torch.randn(text, config.text_in_channels, generator=generator),
    )


def deep(layers: int) -> RefinerConfig:
    """The same sizes with more layers."""
    return replace(CONFIG, num_layers=layers, mm_layers=(0, 1, layers - 2, layers - 1))
