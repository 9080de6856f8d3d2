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
from .plan import model_shape, preview_branches
from .stages import TEXT_TOKENS, side_stages

DEVICES = (1, 2, 4, 8)


@dataclass(frozen=True)
class PlanRow:
    """Bytes on the fullest rank of one layout: the weights of a stage, and its peak with them. Layout "any" is that of
    a stage which every layout runs on single ranks."""

    stage: str
    layout: str
    weights: int
    peak: int

    def describe(self) -> str:
        return f"  {self.stage:22} {self.layout:4} {self.weights / 1e9:8.1f} GB weights {self.peak / 1e9:8.1f} GB peak"


def plan_table(checkpoint: Path, resolution: str) -> list[PlanRow]:
    """Memory of each stage: of the transformers in every layout of `DEVICES` that the model allows, the refiner only
    for 1080p; and of the other stages that the checkpoint has, the video decoder both with whole frames and in the
    smallest tiles.

    Swapped stages are never on a device together, so the largest counts.
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
    if tier(resolution).refined is not None:
        grid = RefinerSettings().grid(clip_lengths()[0])
        for layout in layouts:
            memory = refiner_memory(folder.refiner_config(), grid, TEXT_TOKENS, layout.sp)
            rows.append(PlanRow("refiner", layout.label, memory.tensors["weights"], memory.peak))
    for stage, side in side_stages(folder, resolution).items():
        rows.append(PlanRow(stage, "any", side.weights, side.peak))
        if side.least < side.working:
            rows.append(PlanRow(f"{stage} in tiles", "any", side.weights, side.weights + side.least))
    return rows
