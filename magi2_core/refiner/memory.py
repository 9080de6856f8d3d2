"""How many bytes of device memory a rank needs for the refiner: pure arithmetic on shapes (50 §7, 70 §7)."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from ...distributed.layout import split_evenly
from ..config import RefinerConfig
from ..dit.memory import FLOAT, ForwardMemory, gated_bytes, projected_bytes
from ..dit.runs import piece_rows
from .blocks import Axes, BlockPlan, WindowSettings, plan_blocks
from .parameters import refiner_tensors
from .window_attention import gathered_blocks, similar_blocks

# Latents alive during a forward: the first sample, the present one, the corrected one, three predictions of the solver,
# the other branch's velocity.
_LATENTS = 7


@lru_cache(maxsize=16)  # it lists thousands of windows, and is asked for every rank of a plan
def refiner_memory(
    config: RefinerConfig,
    grid: Axes,
    text: int,
    ranks: int = 1,
    *,
    device_type: str = "cuda",
    residual: torch.dtype = torch.float32,
) -> ForwardMemory:
    """Memory of the rank with the most rows, for a video of `grid` (t, h, w) latents and `text` rows of text.

    `ranks` share the sequence; `config.params_dtype` is the compute dtype; the window attention is the gathering one.
    """
    blocks = plan_blocks(grid, text, WindowSettings())
    rows, compute, d = split_evenly(blocks.tokens, ranks)[0], config.params_dtype.itemsize, config.head_dim
    hidden, heads, kv_heads = config.hidden_size, config.heads, max(config.kv_heads, ranks)  # 50 §8: repeated if fewer
    latent = blocks.video * config.video_in_channels * FLOAT
    sent = rows * (heads + 2 * kv_heads) * d * compute
    piece = piece_rows(2 * config.mlp_width, device_type)
    tensors = {
        "weights": sum(prod(spec.shape) * spec.dtype.itemsize for spec in refiner_tensors(config).values()),
        "latents": _LATENTS * latent,
        "features": latent + blocks.tail * config.text_in_channels * FLOAT,
        "rotary tables and orders": 2 * (rows * 6 * (d // 8) * FLOAT + blocks.video * 8),
        "residual": rows * hidden * residual.itemsize,
        "queries, keys, values": rows * (heads + 2 * config.kv_heads) * d * compute,
        "gates": rows * heads * compute,
        "sent and received": 2 * sent if ranks > 1 else 0,
        "attention's results": 3 * rows * hidden * compute if ranks > 1 else 0,
        "gathered keys": _gathered(config, blocks, ranks, device_type),
        "piece of a projection": piece * projected_bytes(config, heads, config.kv_heads),
        "piece of the MLP": piece * gated_bytes(config, config.mlp_width),
        "first residual": rows * hidden * compute if residual.itemsize != compute else 0,
    }
    lasting = sum(tensors[name] for name in ("weights", "latents", "features", "rotary tables and orders", "residual"))
    own = lasting + tensors["gates"] + tensors["queries, keys, values"]
    all_rows = lasting + tensors["gates"] + (sent if ranks > 1 else tensors["queries, keys, values"])
    return ForwardMemory(tensors, {
        "projection": own + tensors["piece of a projection"],
        "exchange": own + tensors["sent and received"],
        "attention": all_rows + tensors["gathered keys"],
        "exchange back": all_rows + tensors["attention's results"],
        "MLP": lasting + tensors["piece of the MLP"] + tensors["first residual"],
    })  # fmt: skip


def _gathered(config: RefinerConfig, blocks: BlockPlan, ranks: int, device_type: str) -> int:
    """Copies that the attention of one set of query blocks, or of the tail, needs at once."""
    compute, d = config.params_dtype.itemsize, config.head_dim
    key_width, query_width = 2 * max(config.kv_heads // ranks, 1) * d, config.heads // ranks * d
    copied = compute if device_type == "cpu" and compute < FLOAT else 0  # the CPU's kernel works on fp32 copies
    key_bytes = key_width * (compute + (FLOAT if copied else 0))
    query_bytes = query_width * (4 * compute + (3 * FLOAT if copied else 0))
    most = 0
    for (rows, *lengths), members in similar_blocks(blocks).items():
        keys = sum(lengths)
        together = min(len(members), gathered_blocks(keys, key_width * compute, device_type))
        most = max(most, together * (keys * (key_bytes + 8) + rows * query_bytes))
    tail_keys = blocks.tokens * key_width * FLOAT if copied and blocks.tail else 0
    return max(most, tail_keys + blocks.tail * query_bytes)
