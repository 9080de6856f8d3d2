"""The collectives of the parallel layouts (10 §11): every one takes its sizes from a TokenSplit and checks first.

A group is a torch.distributed process group that the caller owns, or None for a group of one rank, where every
function is the identity. No function asks other ranks for sizes: all ranks hold the same TokenSplit counts, and an
exchange with no tokens on any rank sends nothing. Exchanges are for inference: no gradient passes through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import BankShare, LayoutError, ParallelLayout, Position, RankShare, TokenSplit

Group = dist.ProcessGroup | None
_CPU = torch.device("cpu")

# What NCCL and gloo both carry.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8)


@dataclass(frozen=True)
class ParallelContext:
    """This rank's place in a layout, its group on each axis, and its device; a group of one rank is None."""

    layout: ParallelLayout
    rank: int
    sp_group: Group
    tp_group: Group
    cfg_group: Group
    replica_group: Group
    device: torch.device = _CPU

    @classmethod
    def single(cls, device: torch.device = _CPU) -> ParallelContext:
        """The context of a process that works alone."""
        return cls(ParallelLayout(), 0, None, None, None, None, device)

    @classmethod
    def create(cls, layout: ParallelLayout, rank: int, device: torch.device = _CPU) -> ParallelContext:
        """Make the groups of `layout`; every rank calls this at the same time, after torch.distributed is up.

        Raises LayoutError if the running world is not the layout's or `rank` is not this process's.
        """
        if layout.world == 1:
            return cls(layout, rank, None, None, None, None, device)
        if dist.get_world_size() != layout.world or dist.get_rank() != rank:
            raise LayoutError(
                f"Layout {layout.label} has {layout.world} ranks and this should be rank {rank}, but the process group "
                f"has {dist.get_world_size()} ranks and this is rank {dist.get_rank()}."
            )
        # Axes often have the same members (sp and replica in a plain sp layout): one communicator serves both.
        made: dict[tuple[int, ...], Group] = {tuple(range(layout.world)): dist.group.WORLD}
        mine: dict[str, Group] = {}
        for axis in ("sp", "tp", "cfg", "replica"):
            for members in layout.groups(axis):
                if len(members) > 1 and members not in made:
                    made[members] = dist.new_group(list(members))
                if rank in members:
                    mine[axis] = made[members] if len(members) > 1 else None
        return cls(layout, rank, mine["sp"], mine["tp"], mine["cfg"], mine["replica"], device)

    @property
    def position(self) -> Position:
        return self.layout.position(self.rank)

    def split(self, tokens: int) -> TokenSplit:
        """This rank's part of a sequence of `tokens` over the sp group."""
        return TokenSplit.even(tokens, self.layout.sp, self.position.sp)

    def share(self, moe_heads: int, experts: int) -> RankShare:
        """What this rank holds of every tensor of a model with these experts."""
        return self.layout.share(self.rank, moe_heads, experts)


def scatter_heads_gather_tokens(x_SHd: Tensor, split: TokenSplit, group: Group) -> Tensor:
    """From own tokens and all heads [S, H, d] to all tokens and own heads [T, H/P, d] (10 §11.1).

    Rank r gets heads r·H/P to (r+1)·H/P - 1, tokens in global order. Raises LayoutError before communicating if the
    tensor does not match the split or P does not divide H.
    """
    _check(x_SHd, "x", split.local, split, group)
    if group is None:
        return x_SHd
    return _exchange_heads([x_SHd], split, group)[0]


def scatter_qkv(
    q_SHd: Tensor, k_SHd: Tensor, v_SHd: Tensor, split: TokenSplit, group: Group
) -> tuple[Tensor, Tensor, Tensor]:
    """`scatter_heads_gather_tokens` for q, k and v in one all-to-all; the results are views of one buffer.

    Where P is a multiple of the key/value heads, each of them is repeated for the P/Hk neighbouring ranks that need
    it (10 §11.1). Raises LayoutError before communicating if dtypes differ or heads and ranks do not divide.
    """
    tensors = {"q": q_SHd, "k": k_SHd, "v": v_SHd}
    for name, x_SHd in tensors.items():
        _check(x_SHd, name, split.local, split, group)
    if len({(x.dtype, x.device, x.shape[2]) for x in tensors.values()}) > 1:
        listed = ", ".join(f"{name} is {x.dtype} on {x.device} with width {x.shape[2]}" for name, x in tensors.items())
        raise LayoutError(f"q, k and v travel together and must have one dtype, device and head width; {listed}.")
    if k_SHd.shape[1] != v_SHd.shape[1]:
        raise LayoutError(f"k has {k_SHd.shape[1]} heads and v has {v_SHd.shape[1]}; they must be equal.")
    if group is None:
        return q_SHd, k_SHd, v_SHd
    kv_heads = k_SHd.shape[1]
    if kv_heads % split.ranks and kv_heads and split.ranks % kv_heads == 0:
        k_SHd, v_SHd = (x_SHd.repeat_interleave(split.ranks // kv_heads, dim=1) for x_SHd in (k_SHd, v_SHd))
    q_THd, k_THd, v_THd = _exchange_heads([q_SHd, k_SHd, v_SHd], split, group)
    return q_THd, k_THd, v_THd


def scatter_tokens_gather_heads(x_THd: Tensor, split: TokenSplit, group: Group) -> Tensor:
    """The inverse: from all tokens and own heads [T, H/P, d] to own tokens and all heads [S, H, d] (10 §11.1)."""
    _check(x_THd, "x", split.total, split, group)
    if group is None:
        return x_THd
    heads, width = x_THd.shape[1:]
    received_PSHd = x_THd.new_empty(split.ranks, split.local, heads, width)
    if split.total:
        dist.all_to_all_single(
            received_PSHd.flatten(0, 1),
            x_THd.contiguous(),
            [split.local] * split.ranks,
            list(split.counts),
            group,
        )
    return received_PSHd.transpose(0, 1).reshape(split.local, split.ranks * heads, width)


def dispatch_heads(x_SMd: Tensor, split: TokenSplit, shares: Sequence[BankShare], group: Group) -> Tensor:
    """Send each rank the MoE heads that it touches: own tokens [S, M, d] to all tokens [T, heads of this rank, d].

    A head that two ranks share goes to both; a rank without banks receives [T, 0, d] but takes part (10 §11.1, 70 §5).
    Raises LayoutError before communicating if tensor, split and shares do not match.
    """
    _check(x_SMd, "x", split.local, split, group)
    _check_shares(shares, x_SMd.shape[1], split)
    if group is None:
        return x_SMd
    tokens, _, width = x_SMd.shape
    sizes = [tokens * share.heads * width for share in shares]
    sent = x_SMd.new_empty(sum(sizes))
    for part, share in zip(sent.split(sizes), shares, strict=True):
        part.view(tokens, share.heads, width).copy_(x_SMd[:, share.first_head : share.last_head])
    mine = shares[split.rank].heads
    received = x_SMd.new_empty(split.total * mine * width)
    if split.total:
        dist.all_to_all_single(received, sent, [count * mine * width for count in split.counts], sizes, group)
    return received.view(split.total, mine, width)


def combine_heads(y_Thd: Tensor, split: TokenSplit, shares: Sequence[BankShare], group: Group) -> Tensor:
    """Return every token's expert results to its rank: [T, heads of this rank, d] to [S, M, d].

    The partial sums of a head that several ranks share have each been rounded to the tensor's dtype; they are added in
    fp32 and rounded again (70 §5). Raises LayoutError before communicating if tensor, split and shares do not match.
    """
    _check(y_Thd, "y", split.total, split, group)
    heads = max(share.last_head for share in shares)
    _check_shares(shares, heads, split)
    if y_Thd.shape[1] != shares[split.rank].heads:
        raise LayoutError(
            f"y has {y_Thd.shape[1]} heads, but rank {split.rank} of the group touches {shares[split.rank].heads}."
        )
    if group is None:
        return y_Thd
    _, mine, width = y_Thd.shape
    sizes = [split.local * share.heads * width for share in shares]
    received = y_Thd.new_empty(sum(sizes))
    if split.total:
        sent = y_Thd.contiguous().view(-1)
        dist.all_to_all_single(received, sent, sizes, [count * mine * width for count in split.counts], group)
    partial_SHd = [
        part.view(split.local, share.heads, width) for part, share in zip(received.split(sizes), shares, strict=True)
    ]
    y_SMd = y_Thd.new_empty(split.local, heads, width)
    for first, last, owners in _head_runs(tuple(shares)):
        parts = [partial_SHd[r][:, first - shares[r].first_head : last - shares[r].first_head] for r in owners]
        total_SHd = parts[0]
        if len(parts) > 1:
            total_SHd = total_SHd.to(torch.promote_types(y_Thd.dtype, torch.float32))
            for part in parts[1:]:
                total_SHd = total_SHd + part
        y_SMd[:, first:last] = total_SHd
    return y_SMd


def gather_tokens(x_SC: Tensor, split: TokenSplit, group: Group) -> Tensor:
    """All ranks' rows [S, ...] as [T, ...] on every rank, in rank order.

    Counts that differ are padded to the largest and trimmed, because gloo refuses uneven gathers (10 §11.1); the
    padding of an even split is at most one row.
    """
    _check_group(split, group)
    if x_SC.ndim < 1 or x_SC.shape[0] != split.local:
        raise LayoutError(f"x has shape {tuple(x_SC.shape)}; its first size must be {split.local}, this rank's tokens.")
    _check_dtype(x_SC, "x")
    if group is None or not split.total:
        return x_SC
    most = max(split.counts)
    padded_SC = x_SC.contiguous()
    if split.local < most:
        padded_SC = x_SC.new_zeros(most, *x_SC.shape[1:])
        padded_SC[: split.local] = x_SC
    gathered_PSC = x_SC.new_empty(split.ranks, most, *x_SC.shape[1:])
    # its name since torch 2.13, which warns of the old one
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered_PSC.flatten(0, 1), padded_SC, group)
    if min(split.counts) == most:
        return gathered_PSC.flatten(0, 1)
    return torch.cat([rows_SC[:count] for rows_SC, count in zip(gathered_PSC, split.counts, strict=True)])


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """The sum of all ranks' `x`, in place; the tensor has one shape and dtype on all ranks of the group."""
    _check_dtype(x, "x")
    if group is not None and x.numel():
        dist.all_reduce(x, group=group)
    return x


def broadcast(x: Tensor, group: Group) -> Tensor:
    """Overwrite `x` with the first rank's; it has one shape and dtype on all ranks of the group."""
    _check_dtype(x, "x")
    if group is not None and x.numel():
        dist.broadcast(x, dist.get_global_rank(group, 0), group=group)
    return x


def broadcast_text(text: str, group: Group) -> str:
    """The first rank's text on every rank of the group: a length, then bytes; an empty text is one broadcast."""
    if group is None:
        return text
    data = list(text.encode("utf-8", "surrogatepass")) if dist.get_rank(group) == 0 else []
    size = int(broadcast(torch.tensor([len(data)]), group))
    told = broadcast(torch.tensor(data or [0] * size, dtype=torch.uint8), group)
    return bytes(told.tolist()).decode("utf-8", "surrogatepass")


def smallest(value: int, group: Group) -> int:
    """The smallest of all ranks' values; each rank waits here for the others."""
    least = torch.tensor([value])
    if group is not None:
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
    return int(least)


def send(x: Tensor, to: int, group: Group) -> None:
    """Send a CPU tensor to rank `to` of the group, which calls `receive` for it."""
    assert group is not None
    _check_dtype(x, "x")
    dist.send(x.contiguous(), dist.get_global_rank(group, to), group=group)


def receive(shape: Sequence[int], dtype: torch.dtype, source: int, group: Group) -> Tensor:
    """The CPU tensor that rank `source` of the group sends."""
    assert group is not None
    x = torch.empty(*shape, dtype=dtype)
    dist.recv(x, dist.get_global_rank(group, source), group=group)
    return x


def _exchange_heads(tensors_SHd: list[Tensor], split: TokenSplit, group: Group) -> tuple[Tensor, ...]:
    """One all-to-all that scatters the heads of several tensors, side by side on the head axis."""
    tokens, _, width = tensors_SHd[0].shape
    for x_SHd in tensors_SHd:
        if x_SHd.shape[1] % split.ranks:
            raise LayoutError(
                f"{x_SHd.shape[1]} heads cannot be divided over {split.ranks} ranks; the number of ranks must divide "
                "the attention heads, and one of ranks and key/value heads must divide the other."
            )
    heads = [x_SHd.shape[1] // split.ranks for x_SHd in tensors_SHd]
    sent_PSHd = tensors_SHd[0].new_empty(split.ranks, tokens, sum(heads), width)
    for part_PSHd, x_SHd, count in zip(sent_PSHd.split(heads, dim=2), tensors_SHd, heads, strict=True):
        part_PSHd.copy_(x_SHd.unflatten(1, (split.ranks, count)).transpose(0, 1))
    received_THd = sent_PSHd.new_empty(split.total, sum(heads), width)
    if split.total:
        sent = sent_PSHd.flatten(0, 1)
        dist.all_to_all_single(received_THd, sent, list(split.counts), [tokens] * split.ranks, group)
    return received_THd.split(heads, dim=1)


@lru_cache(maxsize=64)
def _head_runs(shares: tuple[BankShare, ...]) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Runs of consecutive heads with the same owners: (first head, one past the last, ranks that hold a part)."""
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for head in range(max(share.last_head for share in shares)):
        owners = tuple(r for r, share in enumerate(shares) if share.first_head <= head < share.last_head)
        if runs and runs[-1][2] == owners:
            runs[-1] = (runs[-1][0], head + 1, owners)
        else:
            runs.append((head, head + 1, owners))
    return tuple(runs)


def _check(x: Tensor, name: str, rows: int, split: TokenSplit, group: Group) -> None:
    _check_group(split, group)
    if x.ndim != 3 or x.shape[0] != rows:
        raise LayoutError(
            f"{name} has shape {tuple(x.shape)}; expected [{rows}, heads, width] for the token split {split.counts} on "
            f"rank {split.rank}."
        )
    _check_dtype(x, name)


def _check_dtype(x: Tensor, name: str) -> None:
    if x.dtype not in _DTYPES:
        listed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise LayoutError(f"{name} is {x.dtype}, which the ranks cannot exchange; use one of {listed}.")


def _check_group(split: TokenSplit, group: Group) -> None:
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    if (split.ranks, split.rank) != (ranks, rank):
        raise LayoutError(
            f"The token split is for rank {split.rank} of {split.ranks}, but this process is rank {rank} of {ranks} in "
            "the group; make the split for this group."
        )


def _check_shares(shares: Sequence[BankShare], heads: int, split: TokenSplit) -> None:
    if len(shares) != split.ranks:
        raise LayoutError(f"There are expert shares for {len(shares)} ranks, but the group has {split.ranks}.")
    if shares[0].first_bank or shares[-1].last_bank != heads * shares[-1].experts:
        raise LayoutError(f"The expert shares end at bank {shares[-1].last_bank}, but {heads} heads were given.")
