"""How many bytes of device memory a rank needs for the preview stage: pure arithmetic on shapes (10 §11, 70 §5, §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ...distributed.layout import BankShare, ParallelLayout, RankShare, TokenSplit
from ..checkpoint.shard import local_bytes
from ..config import PreviewConfig, TransformerConfig
from ..kernels.attention import explicit_rows
from ..kernels.experts import activated_rows, runs_on_device
from .moe import tokens_at_once
from .parameters import preview_tensors
from .runs import piece_rows

FLOAT = 4  # bytes of an fp32 element
INT64 = 8
# Latents alive during a forward: the noise, the present sample, the corrected one, three predictions of the solver, and
# both branches' velocities of the step before.
_LATENTS = 8
_TIME_WIDTH = 64  # of the time embedding that every row carries (20 §6.1)


class BranchRows(NamedTuple):
    """Rows of one guidance branch: video with its pictures, sound, and text with the marks of pictures (20 §6.2)."""

    video: int
    audio: int
    text: int

    @property
    def total(self) -> int:
        return self.video + self.audio + self.text


@dataclass(frozen=True)
class ForwardMemory:
    """Bytes on one rank. tensors: the large ones, by name. phases: for each phase of a forward, everything alive in it;
    the largest one counts."""

    tensors: dict[str, int]
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def working(self) -> int:
        """What a forward needs beside the weights."""
        return self.peak - self.tensors["weights"]


def projected_bytes(config: TransformerConfig, heads: int, kv_heads: int) -> int:
    """For each row of a projection: normed input, products, and the fp32 queries before, while and after they are
    rotated."""
    compute, d = config.params_dtype.itemsize, config.head_dim
    return (config.hidden_size + (heads + 2 * kv_heads) * d) * compute + (2 * d + 6 * (d // 8)) * heads * FLOAT


def gated_bytes(config: TransformerConfig, width: int) -> int:
    """For each row of a gated MLP: normed input, gate and up of `width`, and what their activation holds: two fp32
    tensors, and a clamped half where that is another."""
    compute = config.params_dtype.itemsize
    activated = 2 * FLOAT + (compute if compute < FLOAT else 0)
    return config.hidden_size * compute + width * (2 * compute + activated)


def preview_memory(
    config: PreviewConfig,
    branches: Sequence[BranchRows],
    layout: ParallelLayout,
    rank: int = 0,
    *,
    device_type: str = "cuda",
) -> ForwardMemory:
    """Memory of `rank` while it samples a clip with these guidance branches.

    `config.params_dtype` is the compute dtype. Tensors are counted, not what the allocator, the collectives' library
    and the inside of a matrix product hold beside them.
    """
    part = _Part(config, tuple(branches), layout, rank, device_type)
    tensors = _tensors(part)
    return ForwardMemory(tensors, _phases(part, tensors))


@dataclass(frozen=True)
class _Part:
    """The sizes of one rank's part of a forward."""

    config: PreviewConfig
    all_branches: tuple[BranchRows, ...]
    layout: ParallelLayout
    rank: int
    device_type: str

    @cached_property
    def branches(self) -> tuple[BranchRows, ...]:
        """The branches of this rank's cfg group."""
        place, count = self.layout.position(self.rank), len(self.all_branches)
        return self.all_branches[TokenSplit.even(count, self.layout.cfg, place.cfg).rows]

    @cached_property
    def split(self) -> TokenSplit:
        tokens = sum(branch.total for branch in self.branches)
        return TokenSplit.even(tokens, self.layout.sp, self.layout.position(self.rank).sp)

    @property
    def rows(self) -> int:
        return self.split.local

    @property
    def segment(self) -> int:
        """Rows of the longest segment, over all ranks."""
        return max(branch.total for branch in self.branches)

    @property
    def piece(self) -> int:
        return min(piece_rows(self.config.stream_width, self.device_type), self.rows)

    @property
    def compute(self) -> int:
        return self.config.params_dtype.itemsize

    @property
    def converted(self) -> int:
        """Bytes of an element's fp32 copy, which fp32 rows do not need."""
        return FLOAT if self.compute < FLOAT else 0

    @property
    def normed(self) -> int:
        """Bytes that a norm holds for each element: the fp32 copy and the result."""
        return self.converted + FLOAT

    @property
    def heads(self) -> int:
        return self.config.heads // self.layout.tp

    @property
    def kv_heads(self) -> int:
        return self.config.kv_heads // self.layout.tp

    @property
    def sent_heads(self) -> int:
        """Heads of q, k and v that are sent: each key head as often as ranks need it (10 §11.1)."""
        return self.heads + 2 * max(self.kv_heads, self.split.ranks)

    @property
    def exchanges_heads(self) -> bool:
        """Whether MoE heads travel; under tensor parallelism each rank has whole ones of its own rows (10 §11.2)."""
        return self.split.ranks > 1 and self.layout.tp == 1

    @property
    def share(self) -> RankShare:
        return self.layout.share(self.rank, self.config.moe.num_heads, self.config.moe.num_experts)

    @property
    def shares(self) -> tuple[BankShare, ...]:
        return self.layout.expert_shares(self.config.moe.num_heads, self.config.moe.num_experts)

    @property
    def touched_heads(self) -> int:
        """MoE heads of all ranks together; one whose experts are divided counts for each of its owners (70 §5)."""
        return sum(share.heads for share in self.shares)

    @property
    def divides_heads(self) -> bool:
        return self.exchanges_heads and self.touched_heads > self.config.moe.num_heads

    @property
    def expert_rows(self) -> int:
        return self.rows if self.layout.tp > 1 else self.split.total


def _tensors(part: _Part) -> dict[str, int]:
    config, compute, d = part.config, part.compute, part.config.head_dim
    rows, tokens, ranks = part.rows, part.split.total, part.split.ranks
    gates = 2 * config.num_stream + config.num_stream**2
    sent, head = rows * part.sent_heads * d * compute, config.moe_head_dim * compute
    return {
        "weights": local_bytes(preview_tensors(config), part.share),
        "features": _features(part),
        "latents": _LATENTS * FLOAT * _clip(part),
        "rotary table": rows * 6 * (d // 8) * FLOAT,
        "streams": rows * config.stream_width * compute,
        "stream coefficients": rows * gates * compute,
        "branch input": rows * config.hidden_size * compute,
        "branch output": rows * config.hidden_size * compute,
        "queries, keys, values": rows * (part.heads + 2 * part.kv_heads) * d * compute,
        "head gates": rows * part.heads * compute,
        "sent queries, keys, values": sent if ranks > 1 else 0,
        "received queries, keys, values": tokens * part.sent_heads // ranks * d * compute if ranks > 1 else 0,
        "attention's result": tokens * part.heads // ranks * (d * compute + FLOAT),
        "attention's copies": _attention_copies(part),
        "all MoE heads": rows * config.moe_width // part.layout.tp * compute,
        "sent MoE heads": rows * part.touched_heads * head if part.exchanges_heads else 0,
        "own MoE heads": tokens * part.share.banks.heads * head if part.exchanges_heads else 0,
        "sums of divided heads": rows * 2 * config.moe_head_dim * FLOAT if part.divides_heads else 0,
        "experts": _experts(part),
        "output": rows * config.out_channels * FLOAT,
    }


def _phases(part: _Part, tensors: dict[str, int]) -> dict[str, int]:
    """Everything alive at the worst moment of each phase, in the order of a forward."""

    def held(*names: str) -> int:
        return sum(tensors[name] for name in names)

    config, compute, R, D = part.config, part.compute, part.piece, part.config.hidden_size
    logits = tensors["stream coefficients"] // compute * FLOAT
    lasting = held("weights", "features", "latents", "rotary table", "streams")
    inside = lasting + held("stream coefficients", "branch input")
    attending = inside + tensors["head gates"]
    exchanged = held("sent queries, keys, values", "received queries, keys, values")
    gathered = tensors["received queries, keys, values"] or tensors["queries, keys, values"]
    result = tensors["attention's result"]
    routing = inside + held("branch output", "all MoE heads")
    dense = 2 * config.dense_width // part.layout.tp
    widest = max(config.moe.shared_expert_intermediate_size, config.moe.modality_specific_expert_intermediate_size)
    streams = R * config.stream_width
    projected = projected_bytes(config, part.heads, part.kv_heads)
    unrouted = max(gated_bytes(config, widest // part.layout.tp), D * (part.normed + compute))
    return {
        "stream coefficients": lasting + logits + streams * part.normed,
        "branch input": inside + logits + R * D * (FLOAT + part.converted),
        "attention projection": attending + tensors["queries, keys, values"] + R * projected,
        "exchange": attending + tensors["queries, keys, values"] + exchanged,
        "attention": attending + gathered + result + tensors["attention's copies"],
        "attention output": attending + result * (3 if part.split.ranks > 1 else 1) + tensors["branch output"],
        "dense MLP": inside + tensors["branch output"] + R * gated_bytes(config, dense // 2),
        "unrouted experts": routing + R * unrouted,
        "dispatch": routing + held("sent MoE heads", "own MoE heads"),
        "experts": routing + held("own MoE heads", "experts"),
        "combine": routing + held("own MoE heads", "sent MoE heads", "all MoE heads", "sums of divided heads"),
        "stream update": lasting + held("stream coefficients", "branch output")
        + streams * (FLOAT + part.converted) + R * D * part.converted,
        "output": lasting + tensors["output"] + streams * part.normed,
    }  # fmt: skip


def _features(part: _Part) -> int:
    """What a step is given: the rows of text, made once, and those of the latents and of the time, made anew."""
    config, tokens = part.config, part.split.total
    video, audio, text = (sum(counts) for counts in zip(*part.branches, strict=True))
    width = video * config.video_in_channels + audio * config.audio_in_channels + text * config.text_in_channels
    layout = tokens * 10 * FLOAT if part.device_type == "cpu" else 0  # coordinates and modalities are the host's
    return (width + tokens * _TIME_WIDTH) * FLOAT + tokens + layout


def _clip(part: _Part) -> int:
    """Elements of one clip's latents."""
    clip = part.all_branches[0]
    return clip.video * part.config.video_in_channels + clip.audio * part.config.audio_in_channels


def _attention_copies(part: _Part) -> int:
    """What the attention of the longest segment holds beside the queries, keys, values and the place of its result."""
    rows, heads, d = part.segment, part.heads // part.split.ranks, part.config.head_dim
    lse = rows * heads * FLOAT
    if part.config.attn_softcap > 0 or part.device_type not in ("cpu", "cuda"):  # the explicit path
        scored = min(explicit_rows(heads, rows), rows)
        scores = scored * heads * (rows * FLOAT + d * (part.converted + FLOAT))
        return rows * heads * d * (2 * part.converted + part.compute) + lse + scores
    if part.device_type == "cpu":  # works on fp32 copies of all three
        return rows * heads * d * (3 * part.converted + FLOAT) + lse
    return rows * heads * d * part.compute + lse


def _experts(part: _Part) -> int:
    """The routes of one head: their choice, then their rows, gate and up, then their results and sums."""
    moe, d, compute = part.config.moe, part.config.moe_head_dim, part.compute
    inner, tokens = moe.expert_intermediate_size, min(part.expert_rows, tokens_at_once(moe))
    routes = tokens * moe.top_k
    product = compute if runs_on_device(part.device_type, part.config.params_dtype, d, inner) else FLOAT
    hidden = 0 if product == compute else compute  # elsewhere it takes the gate's place
    active = min(routes, activated_rows(part.device_type, inner)) * inner * (2 * FLOAT + product % FLOAT)
    chosen = tokens * (part.converted * d + 3 * moe.num_experts * FLOAT)
    sorted_rows = FLOAT + 2 * INT64 + d * compute
    evaluated = routes * (sorted_rows + inner * (2 * product + hidden)) + active
    summed = routes * (sorted_rows + 2 * INT64 + inner * compute + d * (product % FLOAT + FLOAT)) + tokens * d * FLOAT
    return max(chosen, evaluated, summed)
