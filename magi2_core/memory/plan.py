"""One request, one plan: which ranks run where, what each holds, and whether it fits.

`make_plan` computes it once, from the checkpoint's architecture and the machine. The loader node shows it, the pool
starts with it, the engine loads by it and the status panel draws it; nothing else decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ...distributed.exchange import ParallelContext
from ...distributed.layout import LayoutError, ModelShape, ParallelLayout, check_layout, legal_layouts
from ..checkpoint.folder import REFINER, CheckpointFolder
from ..checkpoint.shard import local_bytes
from ..config import PreviewConfig, RefinerConfig, parse_dtype
from ..dit.memory import BranchRows, preview_memory
from ..errors import RequestError
from ..refiner.memory import refiner_memory
from ..refiner.model import refiner_parallel
from ..refiner.parameters import refiner_tensors
from ..refiner.stage import RefinerSettings
from ..sampling.geometry import clip_lengths, latent_grid, tier
from .machine import Place, choose_devices, device_memory
from .stages import TEXT_TOKENS, StageMemory, side_stages

RESIDENCIES = ("auto", "keep", "swap")
DTYPES = ("bfloat16", "float32")
HEADROOM = 1 << 30  # the CUDA context, allocator slack, communication buffers


@dataclass(frozen=True)
class RankPlan:
    """One rank: its device, the transformer bytes it holds, the bytes a 540p forward needs beside them, and its memory:
    the device's, or on the CPU an equal part of the host's.

    others: bytes of the largest other stage that a clip may need, alone on the device and with as little as it can
    work with. refiner: bytes of the second stage at 1080p, 0 without one. host: of the device, "" for this one.
    """

    device: str
    weights: int
    working: int
    memory: int
    others: int = 0
    refiner: int = 0
    host: str = ""

    @property
    def place(self) -> str:
        """The device for people, with its host if it is another."""
        return f"{self.device} of {self.host}" if self.host else self.device

    @property
    def needed(self) -> int:
        return max(self.weights + self.working, self.others) + HEADROOM


@dataclass(frozen=True)
class Plan:
    """How a checkpoint runs on this machine. Plain values only, so that it can cross to the workers.

    residency: "keep" leaves every network on its device once it is loaded; "swap" holds one at a time.
    refiner_residual: dtype of the refiner's residual; "bfloat16" saves memory and loses precision (50 §7).
    """

    checkpoint: str
    layout: str
    dtype: str
    residency: str
    refiner_residual: str
    ranks: tuple[RankPlan, ...]

    @property
    def parallel(self) -> ParallelLayout:
        return ParallelLayout.parse(self.layout)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(rank.device for rank in self.ranks)

    @property
    def compute_dtype(self) -> torch.dtype:
        return parse_dtype(self.dtype)

    def to_dict(self) -> dict[str, Any]:
        """The plan as builtins; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote."""
        return cls(**{**data, "ranks": tuple(RankPlan(**rank) for rank in data["ranks"])})

    @property
    def refiner_residual_dtype(self) -> torch.dtype:
        return parse_dtype(self.refiner_residual)

    @property
    def shortage(self) -> str | None:
        """A sentence naming the first rank whose device is too small, or None if everything fits."""
        for number, rank in enumerate(self.ranks):
            if rank.needed > rank.memory:
                advice = "Use more devices, so that each holds a smaller share of the experts."
                if rank.others > rank.weights + rank.working:
                    advice = "A stage beside the transformer takes as much; use a device with more memory."
                return f"{_needs(number, rank.needed, rank)} {advice}"
        return None

    @property
    def refiner_shortage(self) -> str | None:
        """A sentence naming the first rank whose device is too small for 1080p, or None if there is none."""
        for number, rank in enumerate(self.ranks):
            if rank.refiner and rank.refiner + HEADROOM > rank.memory:
                return f"At 1080p: {_needs(number, rank.refiner + HEADROOM, rank)} Use more devices, or 540p."
        return None

    @property
    def difference(self) -> str | None:
        """A sentence about devices of unequal memory, or None: equal shares mean that the smallest decides."""
        small, large = (pick(self.ranks, key=lambda rank: rank.memory) for pick in (min, max))
        if small.memory == large.memory:
            return None
        return (
            f"The devices differ: {small.place} has {_gb(small.memory)} and {large.place} has {_gb(large.memory)}; "
            "every rank holds an equal share, so the smaller one decides."
        )

    def describe(self) -> str:
        """The plan in a few lines, for people."""
        lines = [f"{Path(self.checkpoint).name}: layout {self.layout}, {self.dtype}, {len(self.ranks)} rank(s)"]
        lines += [
            f"  rank {i} on {rank.place}: {_gb(rank.weights)} weights + {_gb(rank.working)} working memory at 540p, "
            f"{_gb(rank.memory)} there"
            for i, rank in enumerate(self.ranks)
        ]
        sentences = (self.difference, self.shortage or "This fits.", self.refiner_shortage)
        lines += [f"  {sentence}" for sentence in sentences if sentence]
        return "\n".join(lines)


def make_plan(
    checkpoint: str | Path,
    *,
    layout: str = "auto",
    devices: Sequence[str] | None = None,
    dtype: str = "bfloat16",
    residency: str = "auto",
    refiner_residual: str = "float32",
    places: Sequence[Place] | None = None,
) -> Plan:
    """Plan how `checkpoint` runs on `devices` (None: every GPU, or one CPU rank).

    layout: "auto", or as ParallelLayout.parse reads it; one that takes fewer devices than there are takes the first.
    dtype: "bfloat16" or "float32". places: instead of `devices` those of workers that run already, on this host or
    others; the layout must take all of them. Raises RequestError, LayoutError or CheckpointError; whether the plan fits
    into memory is for the caller to ask (`Plan.shortage`).
    """
    if residency not in RESIDENCIES:
        raise RequestError(f"residency is {residency!r}; it must be one of {', '.join(RESIDENCIES)}.")
    for name, value in (("dtype", dtype), ("refiner_residual", refiner_residual)):
        if value not in DTYPES:
            raise RequestError(f"{name} is {value!r}; it must be one of {', '.join(DTYPES)}.")
    folder = CheckpointFolder(Path(checkpoint))
    config = replace(folder.preview_config(), params_dtype=parse_dtype(dtype))
    names = choose_devices(devices) if places is None else [place.device for place in places]
    shape = model_shape(config)
    parallel = _auto_layout(shape, len(names)) if layout == "auto" else ParallelLayout.parse(layout)
    if parallel.dp > 1:
        raise LayoutError(
            f"Layout {parallel.label} makes {parallel.dp} clips side by side, but clips are made one after the other; "
            f"use {replace(parallel, dp=1).label}, or divide each clip over more devices."
        )
    check_layout(parallel, shape, len(names))
    if parallel.world < len(names) and (places is not None or (layout == "auto" and devices is not None)):
        raise RequestError(_uneven(shape, parallel, len(names), started=places is not None))
    names = names[: parallel.world]
    if places is None:  # ranks on the CPU share the host's memory
        shares = {"cpu": names.count("cpu")}
        places = [Place(name, device_memory(name) // shares.get(name, 1)) for name in names]
    networks = _networks(folder, config, parse_dtype(refiner_residual))
    ranks = tuple(_plan_rank(networks, parallel, rank, place) for rank, place in enumerate(places))
    if residency == "auto":
        residency = "keep" if all(_keeps(networks, rank) for rank in ranks) else "swap"
    return Plan(str(folder.root), parallel.label, dtype, residency, refiner_residual, ranks)


@dataclass(frozen=True)
class _Networks:
    """What a checkpoint holds beside each other: both transformers in the compute dtype, and the other stages."""

    preview: PreviewConfig
    refiner: RefinerConfig | None
    residual: torch.dtype
    sides: Mapping[str, StageMemory]


def _networks(folder: CheckpointFolder, preview: PreviewConfig, residual: torch.dtype) -> _Networks:
    refiner = None
    if (folder.root / REFINER).is_dir():
        refiner = replace(folder.refiner_config(), params_dtype=preview.params_dtype)
    return _Networks(preview, refiner, residual, side_stages(folder, "540p"))


def _plan_rank(networks: _Networks, layout: ParallelLayout, rank: int, place: Place) -> RankPlan:
    kind = torch.device(place.device).type
    preview = preview_memory(networks.preview, preview_branches("540p"), layout, rank, device_type=kind)
    others = max((side.weights + side.least for side in networks.sides.values()), default=0)
    refiner = 0
    if networks.refiner is not None:
        context = ParallelContext(layout, rank, None, None, None, None)
        refiner = refiner_memory(
            networks.refiner, RefinerSettings().grid(clip_lengths()[0]), TEXT_TOKENS,
            refiner_parallel(context, networks.refiner).layout.sp, device_type=kind, residual=networks.residual,
        ).peak  # fmt: skip
    weights = preview.tensors["weights"]
    return RankPlan(place.device, weights, preview.working, place.memory, others, refiner, place.host)


def _keeps(networks: _Networks, rank: RankPlan) -> bool:
    """Whether all networks have room on a rank's device together, and each beside the others room to work."""
    refiner = 0 if networks.refiner is None else local_bytes(refiner_tensors(networks.refiner), None)
    sides = networks.sides.values()
    weights = rank.weights + refiner + sum(side.weights for side in sides)
    working = max(rank.working, rank.refiner - refiner, *(side.working for side in sides))
    return weights + working + HEADROOM <= rank.memory


def model_shape(config: PreviewConfig) -> ModelShape:
    """The sizes that a parallel layout of this model must divide."""
    moe = config.moe
    widths = (config.hidden_size, config.dense_width, moe.shared_expert_intermediate_size,
              moe.modality_specific_expert_intermediate_size)
    return ModelShape(config.heads, config.kv_heads, moe.num_heads, widths)


def _auto_layout(shape: ModelShape, devices: int) -> ParallelLayout:
    """The largest sequence-parallel layout: it moves the least data and divides the experts furthest (70 §5)."""
    candidates = [layout for layout in legal_layouts(shape, devices) if layout.tp == layout.cfg == 1]
    return max(candidates, key=lambda layout: layout.sp)


def _uneven(shape: ModelShape, layout: ParallelLayout, devices: int, *, started: bool) -> str:
    counts = ", ".join(str(legal.sp) for legal in legal_layouts(shape, devices) if legal.tp == legal.cfg == 1)
    if started:
        return (
            f"{devices} workers run, but layout {layout.label} takes {layout.world}; start as many as it takes, or "
            f"choose a layout of {devices}. Alone, sp takes {counts} of them."
        )
    return (
        f"{devices} devices are asked for, but this model's heads divide over {counts} of them. Ask for one of these "
        "numbers, or choose a layout, which may be smaller."
    )


def preview_branches(resolution: str) -> list[BranchRows]:
    """Rows of both guidance branches of a clip, with prompts of usual length."""
    video = prod(latent_grid(*tier(resolution).preview))
    return [BranchRows(video, clip_lengths()[1], TEXT_TOKENS // 2)] * 2


def _needs(number: int, needed: int, rank: RankPlan) -> str:
    return f"Rank {number} needs {_gb(needed)} on {rank.place} and {_gb(rank.memory)} are there."


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
