"""The smallest checkpoint that goes every way of the engine, what is asked of it, and a listener that can cancel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from magi2_native.magi2_core.checkpoint.miniature import MiniatureSize
from magi2_native.magi2_core.engine import Engine, make_engine
from magi2_native.magi2_core.events import Silent
from magi2_native.magi2_core.memory.plan import Plan, make_plan
from magi2_native.magi2_core.sampling.guidance import GuidanceSettings
from torch import Tensor

TINY = MiniatureSize(
    hidden_size=192, layers=2, experts=6, expert_width=16, text_width=32, text_layers=4, text_merges=64,
    refiner_layers=1, turbo_width=4, oobleck_width=4,
)  # fmt: skip
PROMPT = "A boat on a lake; wind, and a bell far away."
SIZE = {"width": 64, "height": 32}  # latents of 4 x 2: T and L are always those of ten seconds


def tiny_plan(checkpoint: Path, layout: str = "sp1", dtype: str = "float32", **options: Any) -> Plan:
    """A plan of as many CPU ranks as the layout has."""
    return make_plan(checkpoint, layout=layout, devices=["cpu"] * 4, dtype=dtype, **options)


def tiny_engine(checkpoint: Path, **options: Any) -> Engine:
    """An engine of one rank."""
    return make_engine(tiny_plan(checkpoint, **options).to_dict())


@dataclass
class Listener:
    """Events that are kept, and `interrupt` raised where it says: at check number `at_check`, counted from 1, or at the
    first progress report of the stage `at_stage`."""

    interrupt: BaseException | None = None
    at_check: int = 0
    at_stage: str = ""
    ticks: list[tuple[str, int, int]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    checks: int = 0

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        self.ticks.append((stage, done, total))
        if self.interrupt is not None and stage == self.at_stage:
            raise self.interrupt

    def log(self, text: str) -> None:
        self.lines.append(text)

    def check(self) -> None:
        self.checks += 1
        if self.interrupt is not None and self.checks == self.at_check:
            raise self.interrupt


@dataclass(frozen=True)
class Encoded:
    """What every clip of these tests is made from."""

    features: Tensor
    null_features: Tensor
    markers: Tensor
    image: Tensor

    def sample(self, *, picture: bool = False, seed: int = 42, **changes: Any) -> dict[str, Any]:
        """Arguments of the engine's `sample`."""
        return {
            "features": self.features, "null_features": self.null_features, "markers": self.markers,
            "image_latents": self.image if picture else None, **SIZE, "seed": seed, "noise_device": "cpu", "steps": 2,
            "shift": 7.0, "guidance": asdict(GuidanceSettings()), **changes,
        }  # fmt: skip

    def refine(self, latent: dict[str, Tensor], *, seed: int = 42, **settings: Any) -> dict[str, Any]:
        """Arguments of the engine's `refine`."""
        return {
            **latent, "features": self.features, "null_features": self.null_features, "seed": seed,
            "noise_device": "cpu", "settings": {"width": 96, "height": 64, "steps": 2, **settings},
        }  # fmt: skip


def encode(run: Callable[..., dict[str, Any]]) -> Encoded:
    """Encode the prompt and a picture through anything that runs engine calls."""
    text = run("encode_text", {"prompt": PROMPT, "negative_prompt": "noise", "figures": [1]}, Silent())
    images = run("encode_image", {"pictures": [picture()], **SIZE}, Silent())
    return Encoded(text["features"], text["null_features"], text["markers"], images["latents"])


def picture() -> Tensor:
    """A picture uint8 [H, W, 3]."""
    return (torch.arange(90 * 160 * 3) % 255).to(torch.uint8).view(90, 160, 3)


def difference(got: Tensor, expected: Tensor) -> float:
    """The relative L2 error."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()
