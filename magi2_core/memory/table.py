"""How much memory a resolution takes on 1, 2, 4 and 8 devices: arithmetic on the architecture alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...distributed.layout import ParallelLayout
from ..checkpoint.folder import CheckpointFolder
from ..dit.memory import preview_memory
from ..refiner.memory import refiner_memory
from ..refiner.stage import RefinerSettings
from ..sampling.geometry import clip_lengths, tier
from .plan import TEXT_TOKENS, model_shape, preview_branches

DEVICES = (1, 2, 4, 8)


@dataclass(frozen=True)
class PlanRow:
    """Bytes on the fullest rank of one layout: the weights of a stage, and its peak with them."""

    stage: str
    layout: str
    weights: int
    peak: int

    def describe(self) -> str:
        return f"  {self.stage:8} {self.layout:4} {self.weights / 1e9:8.1f} GB weights {self.peak / 1e9:8.1f} GB peak"


def plan_table(checkpoint: Path, resolution: str) -> list[PlanRow]:
    """Memory of the preview, and for 1080p of the refiner, in every layout of `DEVICES` that the model allows.

    The two stages are never on a device together, so the larger one counts.
    """
    folder = CheckpointFolder(checkpoint)
    config = folder.preview_config()
    branches = preview_branches(resolution)
    layouts = [layout for ranks in DEVICES if not model_shape(config).objection(layout := ParallelLayout(sp=ranks))]
    rows = []
    for layout in layouts:
        ranks = [preview_memory(config, branches, layout, rank) for rank in range(layout.world)]
        fullest = max(ranks, key=lambda memory: memory.peak)
        rows.append(PlanRow("preview", layout.label, fullest.tensors["weights"], fullest.peak))
    if tier(resolution).refined is None:
        return rows
    grid = RefinerSettings().grid(clip_lengths()[0])
    for layout in layouts:
        memory = refiner_memory(folder.refiner_config(), grid, TEXT_TOKENS, layout.sp)
        rows.append(PlanRow("refiner", layout.label, memory.tensors["weights"], memory.peak))
    return rows
