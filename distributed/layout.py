"""How tokens, heads, experts and ranks divide over a parallel layout (10 §11, 70 §5). Pure arithmetic.

Nothing here imports torch: the planner, the loader, the model and the tests all ask the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal, NamedTuple

ExpertDivision = Literal["banks", "padded"]
Axis = Literal["tp", "sp", "cfg", "replica"]
MOST_RANKS = 1024  # beyond any layout of the model: a larger number is a slip


class LayoutError(ValueError):
    """A layout, split or tensor that does not fit the ranks; the message says what would."""


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Divide `total` into `parts` counts; the first total % parts get one more (10 §11.1)."""
    if parts < 1 or total < 0:
        raise LayoutError(f"{total} cannot be divided into {parts} parts; give 0 or more and at least one part.")
    size, extra = divmod(total, parts)
    return (size + 1,) * extra + (size,) * (parts - extra)


@dataclass(frozen=True)
class TokenSplit:
    """Token counts of all ranks of a group, in group-rank order, and which of them is ours.

    Made once per request and passed to every layer, so that no layer asks the other ranks for sizes (10 §11.1).
    """

    counts: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.counts):
            raise LayoutError(f"Rank {self.rank} is not one of the {len(self.counts)} ranks of the token split.")
        if min(self.counts) < 0:
            raise LayoutError(f"The token split {self.counts} has a negative count; every rank holds 0 or more tokens.")

    @classmethod
    def even(cls, total: int, ranks: int, rank: int) -> TokenSplit:
        """The split of `total` tokens in which counts differ by at most one."""
        return cls(split_evenly(total, ranks), rank)

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @property
    def local(self) -> int:
        return self.counts[self.rank]

    @cached_property
    def start(self) -> int:
        """Global index of this rank's first token."""
        return sum(self.counts[: self.rank])

    @cached_property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def rows(self) -> slice:
        """This rank's rows of a tensor over all tokens."""
        return slice(self.start, self.start + self.local)


@dataclass(frozen=True)
class BankShare:
    """The contiguous (head, expert) banks [first_bank, last_bank) that one rank holds; bank = head·experts + expert."""

    first_bank: int
    last_bank: int
    experts: int

    @property
    def banks(self) -> int:
        return self.last_bank - self.first_bank

    @property
    def first_head(self) -> int:
        return self.first_bank // self.experts

    @property
    def last_head(self) -> int:
        """One past the last head that this rank touches, also partly; equal to `first_head` without banks."""
        return -(-self.last_bank // self.experts) if self.banks else self.first_head

    @property
    def heads(self) -> int:
        return self.last_head - self.first_head


@lru_cache(maxsize=64)
def bank_shares(moe_heads: int, experts: int, ranks: int, mode: ExpertDivision = "banks") -> tuple[BankShare, ...]:
    """The expert banks of every rank.

    "banks" divides all moe_heads·experts banks evenly, so that a head may be shared by neighbours (70 §5). "padded"
    gives each rank ceil(moe_heads / ranks) whole heads, and trailing ranks what is left, which may be none (10 §11.1).
    Both are the same where `ranks` divides `moe_heads`.
    """
    total = moe_heads * experts
    if mode == "banks":
        counts: Iterable[int] = split_evenly(total, ranks)
    else:
        per_rank = -(-moe_heads // ranks) * experts
        counts = (min(per_rank, max(0, total - per_rank * rank)) for rank in range(ranks))
    shares, first = [], 0
    for count in counts:
        shares.append(BankShare(first, first + count, experts))
        first += count
    return tuple(shares)


@dataclass(frozen=True)
class RankShare:
    """What decides one rank's slice of every tensor of a checkpoint (10 §11)."""

    tp: int
    tp_rank: int
    banks: BankShare


class Position(NamedTuple):
    """Where a rank stands on each axis of a layout."""

    dp: int
    cfg: int
    sp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """How many ways each axis is divided. rank = ((dp·CFG + cfg)·SP + sp)·TP + tp.

    sp: tokens and heads (10 §11.1); tp: weights (10 §11.2); cfg: 2 puts the two guidance branches on two groups;
    dp: independent replicas; experts: how expert banks divide over sp ranks.
    """

    sp: int = 1
    tp: int = 1
    cfg: int = 1
    dp: int = 1
    experts: ExpertDivision = "banks"

    def __post_init__(self) -> None:
        for name in ("sp", "tp", "cfg", "dp"):
            if getattr(self, name) < 1:
                raise LayoutError(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if self.cfg > 2:
            raise LayoutError(f"cfg is {self.cfg}; it must be 1 or 2, because guidance has two branches.")
        if self.experts not in ("banks", "padded"):
            raise LayoutError(f"experts is {self.experts!r}; it must be 'banks' or 'padded'.")

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Read 'sp4', 'tp2sp2', 'CFG2 x SP4', 'dp2-sp4' or 'sp8-padded', axes in any order; LayoutError otherwise."""
        word = r"(sp|tp|cfg|dp)(\d+)|(padded|banks)"
        found = re.findall(word, text.lower())
        sizes = {axis: int(size) for axis, size, _ in found if axis}
        modes = [mode for *_, mode in found if mode]
        rest = re.sub(word + r"|[\s\-_,x×·]", "", text.lower())
        if rest or not sizes or len(found) > len(sizes) + len(modes) or len(modes) > 1:
            raise LayoutError(f"{text!r} is not a layout; write for example sp4, tp2sp2, cfg2sp4, sp8-padded.")
        return cls(**sizes, experts=modes[0] if modes else "banks")

    @property
    def label(self) -> str:
        """The shortest text that `parse` reads back as this layout."""
        axes = "".join(f"{name}{size}" for name in ("dp", "cfg", "tp", "sp") if (size := getattr(self, name)) > 1)
        return (axes or "sp1") + ("-padded" if self.experts == "padded" else "")

    @property
    def replica(self) -> int:
        """Ranks that work on one request together."""
        return self.cfg * self.sp * self.tp

    @property
    def world(self) -> int:
        return self.dp * self.replica

    def position(self, rank: int) -> Position:
        """Where `rank` stands on each axis; LayoutError if it is not a rank of this layout."""
        if not 0 <= rank < self.world:
            raise LayoutError(f"Rank {rank} is not in layout {self.label}, which has ranks 0 to {self.world - 1}.")
        rest, tp = divmod(rank, self.tp)
        rest, sp = divmod(rest, self.sp)
        dp, cfg = divmod(rest, self.cfg)
        return Position(dp, cfg, sp, tp)

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only along `axis`, each in the order of that axis; "replica": equal dp."""
        if axis == "replica":
            return [tuple(range(first, first + self.replica)) for first in range(0, self.world, self.replica)]
        members: dict[Position, list[int]] = {}
        for rank in range(self.world):
            members.setdefault(self.position(rank)._replace(**{axis: 0}), []).append(rank)
        return [tuple(ranks) for ranks in members.values()]

    def expert_shares(self, moe_heads: int, experts: int) -> tuple[BankShare, ...]:
        """The banks of each rank of the group that divides the experts: the tp group where tp > 1, else the sp group.

        With tensor parallelism every rank's own output columns are whole heads and nothing is exchanged (10 §11.2).
        """
        if self.tp > 1:
            return bank_shares(moe_heads, experts, self.tp, self.experts)
        return bank_shares(moe_heads, experts, self.sp, self.experts)

    def share(self, rank: int, moe_heads: int, experts: int) -> RankShare:
        """What `rank` holds of every tensor of a model with these experts."""
        position = self.position(rank)
        index = position.tp if self.tp > 1 else position.sp
        return RankShare(self.tp, position.tp, self.expert_shares(moe_heads, experts)[index])


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that a layout must divide; the defaults are the released preview transformer.

    widths: sizes that tensor parallelism divides besides heads (hidden, dense, shared and modality expert widths).
    """

    heads: int = 24
    kv_heads: int = 24
    moe_heads: int = 12
    widths: tuple[int, ...] = (3072, 8192, 1280)

    def objection(self, layout: ParallelLayout) -> str | None:
        """Why the model cannot run in `layout`, as a clause, or None if it can (10 §11.1, §11.2)."""
        sp, tp = layout.sp, layout.tp
        for size, what in ((self.heads, "attention heads"), (self.kv_heads, "key/value heads"),
                           (self.moe_heads, "MoE heads"), *((width, "columns") for width in self.widths)):
            if size % tp:
                return f"tp{tp} does not divide the {size} {what}"
        if self.heads % (tp * sp):
            return f"{'tp·sp = ' if tp > 1 else 'sp'}{tp * sp} does not divide the {self.heads} attention heads"
        kv_heads = self.kv_heads // tp
        if kv_heads % sp and sp % kv_heads:
            return f"neither sp{sp} nor the {kv_heads} key/value heads of a rank divides the other"
        return None


def legal_layouts(model: ModelShape, devices: int) -> list[ParallelLayout]:
    """Every layout of one replica (dp = 1) that the model and the device count allow, smallest first."""
    sizes = range(1, devices + 1)
    layouts = [ParallelLayout(sp, tp, cfg) for cfg, tp, sp in product((1, 2), sizes, sizes) if cfg * tp * sp <= devices]
    legal = [layout for layout in layouts if model.objection(layout) is None]
    return sorted(legal, key=lambda layout: (layout.world, layout.cfg, layout.tp))


def check_layout(layout: ParallelLayout, model: ModelShape, devices: int) -> None:
    """Raise LayoutError, naming everything that is legal, if the model or the device count do not allow `layout`."""
    objection = model.objection(layout)
    if objection is None and layout.world > devices:
        objection = f"it needs {layout.world} devices and {devices} {'is' if devices == 1 else 'are'} there"
    if objection is None:
        return
    choices: dict[int, list[str]] = {}
    for legal in legal_layouts(model, devices):
        if legal.cfg == 1:
            choices.setdefault(legal.tp, []).append(str(legal.sp))
    listed = "; ".join(("" if tp == 1 else f"tp{tp} with ") + "sp " + ", ".join(sp) for tp, sp in choices.items())
    raise LayoutError(
        f"Layout {layout.label} is not possible, because {objection}. On {devices} device{'s' * (devices != 1)} this "
        f"model allows {listed or 'nothing'}; each also with cfg2 while 2·tp·sp is at most {devices}."
    )
