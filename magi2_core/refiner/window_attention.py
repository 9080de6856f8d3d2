"""Attention of a video's blocks to their neighbours and the tail, and of the tail to everything (50 §6).

Three ways to one result. `mask`: the plain definition, quadratic in memory, for small sequences. `gather`: the keys of
a few query blocks at a time are copied side by side and handed to dense attention without a mask; its cost follows the
attended pairs, and it runs on every device. `flex`: torch's compiled block-sparse attention, for CUDA.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MissingDependencyError, check_choice
from .blocks import BlockPlan

BACKENDS = ("auto", "mask", "gather", "flex")
# Below this many tokens the explicit mask is small and one call beats many.
_SMALL = 1024
# Bytes of the keys and values that are gathered at once: in cache on a CPU, enough work for one launch on a GPU.
_GATHERED = {"cpu": 1 << 24}
_GATHERED_GPU = 1 << 29
# Rows of a tile of the compiled kernel.
_TILE = 128
# Where the errors of a compilation come from.
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")


@dataclass(frozen=True)
class Bucket:
    """Query blocks of one length whose keys lie in runs of equal lengths, so that they can be stacked without padding.

    query_starts_N: their first rows. key_starts_NR: the first row of each run of their keys. run_K, offset_K: for each
    gathered key, the run that it belongs to and its place in it. All int64, on the device of the attention.
    """

    query_rows: int
    query_starts_N: Tensor
    key_starts_NR: Tensor
    run_K: Tensor
    offset_K: Tensor


@dataclass(frozen=True)
class WindowPlan:
    """A block plan and what its backend needs on the device; made once per request."""

    blocks: BlockPlan
    backend: str
    buckets: tuple[Bucket, ...] = ()
    allowed_TT: Tensor | None = None
    block_mask: Any = None


def plan_windows(blocks: BlockPlan, device: torch.device, backend: str = "auto") -> WindowPlan:
    """Choose the backend and make its indices. RequestError for an unknown backend, MissingDependencyError for flex."""
    check_choice("The window attention backend", backend, BACKENDS)
    if backend == "auto":
        backend = "mask" if blocks.tokens <= _SMALL else "gather"
    if backend == "mask":
        return WindowPlan(blocks, backend, allowed_TT=blocks.mask().to(device))
    if backend == "flex":
        return WindowPlan(blocks, backend, block_mask=flex_block_mask(blocks, device))
    return WindowPlan(blocks, backend, buckets=tuple(_buckets(blocks, device)))


def window_attention_(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, plan: WindowPlan) -> Tensor:
    """Softmax attention over the allowed keys with scale d^-1/2, fp32 inside; the result may overwrite q.

    q [T, H, d]; k and v [T, Hk, d], any strides, one dtype; query head h uses key head h // (H / Hk). T is the plan's.
    Returns [T, H, d] in q's dtype.
    """
    if q_THd.shape[0] != plan.blocks.tokens:
        raise ValueError(f"q has {q_THd.shape[0]} rows for a plan of {plan.blocks.tokens}.")
    attend = {"mask": _masked, "gather": _gathered_, "flex": _flex}[plan.backend]
    return attend(q_THd, k_THd, v_THd, plan)


def _masked(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, plan: WindowPlan) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None].float() for x in (q_THd, k_THd, v_THd))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=plan.allowed_TT, enable_gqa=True)
    return o[0].transpose(0, 1).to(q_THd.dtype)


def similar_blocks(blocks: BlockPlan) -> dict[tuple[int, ...], list[tuple[int, list[int]]]]:
    """The query blocks, grouped by their number of rows and the lengths of the runs of their keys, the tail included.

    Each with its first row and the first row of each of the runs.
    """
    starts = blocks.starts
    groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = defaultdict(list)
    for block, runs in enumerate(blocks.key_runs):
        rows = [(starts[first], starts[last]) for first, last in runs]
        if blocks.tail:
            rows.append((blocks.video, blocks.tokens))
        key = (starts[block + 1] - starts[block], *(stop - start for start, stop in rows))
        groups[key].append((starts[block], [start for start, _ in rows]))
    return groups


def _buckets(blocks: BlockPlan, device: torch.device) -> Iterator[Bucket]:
    for (query_rows, *lengths), members in similar_blocks(blocks).items():
        run_K = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        offset_K = torch.cat([torch.arange(length) for length in lengths])
        yield Bucket(
            query_rows,
            torch.tensor([query for query, _ in members], device=device),
            torch.tensor([keys for _, keys in members], device=device),
            run_K.to(device),
            offset_K.to(device),
        )


def _gathered_(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, plan: WindowPlan) -> Tensor:
    """Overwrites q block by block: no other block reads those rows."""
    key_bytes = 2 * k_THd[0].numel() * k_THd.element_size()
    for bucket in plan.buckets:
        step = gathered_blocks(len(bucket.run_K), key_bytes, q_THd.device.type)
        rows_Q = torch.arange(bucket.query_rows, device=q_THd.device)
        chunks = zip(bucket.query_starts_N.split(step), bucket.key_starts_NR.split(step), strict=True)
        for queries_N, starts_NR in chunks:
            keys_NK = starts_NR[:, bucket.run_K] + bucket.offset_K
            _attend_rows_(q_THd, k_THd, v_THd, queries_N[:, None] + rows_Q, keys_NK)
    if plan.blocks.tail:
        tail = slice(plan.blocks.video, None)
        q_THd[tail] = _dense(q_THd[None, tail], k_THd[None], v_THd[None])[0]
    return q_THd


def _attend_rows_(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, queries_NQ: Tensor, keys_NK: Tensor) -> None:
    """Attention of N sets of query rows, each to its set of key rows, over q."""
    q_NQHd, k_NKHd, v_NKHd = (
        x_THd.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        for x_THd, rows in ((q_THd, queries_NQ), (k_THd, keys_NK), (v_THd, keys_NK))
    )
    q_THd.index_copy_(0, queries_NQ.flatten(), _dense(q_NQHd, k_NKHd, v_NKHd).flatten(0, 1))


def gathered_blocks(keys: int, key_bytes: int, device_type: str) -> int:
    """How many query blocks with `keys` keys each are attended at once; `key_bytes` of key and value for each key."""
    return max(1, _GATHERED.get(device_type, _GATHERED_GPU) // (key_bytes * keys))


def _dense(q_NQHd: Tensor, k_NKHd: Tensor, v_NKHd: Tensor) -> Tensor:
    """Attention of all Q queries to all K keys, N times. Without a mask, the query heads that share a key head are just
    more queries of it, so keys are never repeated."""
    q = q_NQHd.unflatten(2, (k_NKHd.shape[2], -1)).permute(0, 2, 3, 1, 4)  # [N, Hk, G, Q, d]
    group = q.shape[2]
    q, k, v = q.flatten(2, 3), k_NKHd.transpose(1, 2), v_NKHd.transpose(1, 2)
    if q.device.type == "cpu":  # the CPU kernel is faster in fp32, and keeps the probabilities unrounded
        q, k, v = q.float(), k.float(), v.float()
    o = F.scaled_dot_product_attention(q, k, v).unflatten(2, (group, -1))
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q_NQHd.dtype)


def _flex(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, plan: WindowPlan) -> Tensor:
    """Compiles for the first lengths that it is given. MissingDependencyError where nothing can be compiled."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THd, k_THd, v_THd))
    try:
        o: Tensor = _compiled_flex()(q, k, v, block_mask=plan.block_mask, enable_gqa=True)
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILERS):
            raise
        inner = getattr(error, "inner_exception", error)
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from error
        reason = str(inner).strip().partition("\n")[0]
        raise MissingDependencyError(
            f"The flex backend of the window attention cannot be compiled here ({reason}). It needs Triton and a C"
            " compiler; choose the backend 'gather'."
        ) from error
    return o[0].transpose(0, 1)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Every prompt has a length of its own: the second one is compiled for all that follow. Without fullgraph torch
    # would give up compiling some day, and make the scores of all pairs of tokens.
    return torch.compile(flex_attention, fullgraph=True)


def flex_block_mask(blocks: BlockPlan, device: torch.device) -> Any:
    """The BlockMask of torch's flex attention, from the tiles' corners: nothing of the dense mask's size is made.

    Tiles of 128 rows need not be blocks (the last blocks of an axis are short): a tile pair that is allowed throughout
    is listed as full, one that may hold an allowed pair is listed for the element-wise test.
    """
    rows = _rows(blocks).to(device)
    video = blocks.video
    # One row for the whole tail: their size does not follow the prompt's length, for which nothing is compiled again.
    place_AV, low_AV, high_AV = (x[:, : video + 1].contiguous() for x in (rows.place_AT, rows.low_AT, rows.high_AT))

    def allowed(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query >= video) | (key >= video)
        query, key = query.clamp(max=video), key.clamp(max=video)
        inside = [
            (low_AV[axis, query] <= place_AV[axis, key]) & (place_AV[axis, key] <= high_AV[axis, query])
            for axis in range(3)
        ]
        return near | (inside[0] & inside[1] & inside[2])

    some, every = _tile_pairs(rows)
    tiles = (*_listed(some & ~every), *_listed(every))
    try:
        from torch.nn.attention.flex_attention import BlockMask

        lengths = (blocks.tokens, blocks.tokens)
        return BlockMask.from_kv_blocks(*tiles, BLOCK_SIZE=_TILE, mask_mod=allowed, seq_lengths=lengths)
    except (ImportError, TypeError) as error:
        raise MissingDependencyError(
            f"The flex backend of the window attention needs a newer flex attention than that of torch"
            f" {torch.__version__} ({error}); choose the backend 'gather'."
        ) from error


@dataclass(frozen=True)
class _Rows:
    """For each packed row, its block's place on the three axes and the places that it sees; tail_T marks the tail."""

    place_AT: Tensor
    low_AT: Tensor
    high_AT: Tensor
    tail_T: Tensor

    def to(self, device: torch.device) -> _Rows:
        return _Rows(*(x.to(device) for x in (self.place_AT, self.low_AT, self.high_AT, self.tail_T)))


def _rows(blocks: BlockPlan) -> _Rows:
    places = torch.tensor([*product(*(range(len(axis)) for axis in blocks.windows)), (0, 0, 0)], dtype=torch.int32)
    block_T = blocks.block_of_rows()
    place_AT = places.T[:, block_T].contiguous()
    edges = [torch.tensor(axis, dtype=torch.int32) for axis in blocks.windows]
    bounds_AT2 = torch.stack([edge[place_T.long()] for edge, place_T in zip(edges, place_AT, strict=True)])
    low_AT, high_AT = (bounds_AT2[..., side].contiguous() for side in (0, 1))
    return _Rows(place_AT, low_AT, high_AT, block_T == blocks.blocks)


def _tile_pairs(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Which pairs of tiles may hold an allowed pair of rows, and which hold nothing else: two bool [tiles, tiles]."""

    def corners(x: Tensor) -> tuple[Tensor, Tensor]:
        short = -x.shape[-1] % _TILE
        tiles = F.pad(x.float()[None], (0, short), mode="replicate")[0].unflatten(-1, (-1, _TILE))
        return tiles.amin(-1), tiles.amax(-1)

    (place0, place1), (low0, low1), (high0, high1) = (corners(x) for x in (rows.place_AT, rows.low_AT, rows.high_AT))
    whole_tail = corners(rows.tail_T[None])[0][0].bool()
    # Rows of the tail are put into the first block: a tile that holds them beside the last video rows then spans all
    # blocks, and so is tested against every tile, but is never taken for one that is allowed throughout.
    some = ((low0[:, :, None] <= place1[:, None]) & (high1[:, :, None] >= place0[:, None])).all(0)
    every = ((low1[:, :, None] <= place0[:, None]) & (high0[:, :, None] >= place1[:, None])).all(0)
    return some, every | whole_tail[:, None] | whole_tail


def _listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """How many key tiles each query tile has, and which, in flex attention's form."""
    order = pairs.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return pairs.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]
