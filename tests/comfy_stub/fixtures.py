"""What the node tests share: the stub with a fake pool behind the nodes, and a checkpoint folder to choose."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from magi2_native.magi2_core.checkpoint.miniature import write_miniature
from magi2_native.tests.miniatures import TINY

from . import Stub, execute, installed
from .fake_pool import FakePool

SMALLEST = replace(TINY, wan_width=4)


def write_checkpoint(root: Path, without: tuple[str, ...] = ("refiner",)) -> Path:
    """A checkpoint of the test's own, which it may damage. Plans for a refiner take longer, so few have one."""
    return Path(shutil.copytree(_written_once() / "mini", root, ignore=shutil.ignore_patterns(*without)))


@functools.cache
def _written_once() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="magi2-checkpoint-"))
    atexit.register(shutil.rmtree, folder)
    write_miniature(folder / "mini", size=SMALLEST)
    return folder


@dataclass
class Graph:
    """The pack inside the stub, with fake pools."""

    stub: Stub
    nodes: dict[str, Any]
    pools: list[FakePool]
    manager: Any
    refuse_start: bool = False

    def run(self, node: str, node_id: str = "1", **inputs: Any) -> Any:
        """Execute a node and return its outputs; a single one is not wrapped."""
        result = execute(self.nodes[node], node_id=node_id, **inputs).args
        return result[0] if len(result) == 1 else result

    def model(self, **options: Any) -> Any:
        return self.run("Magi2LoadCheckpoint", **{"checkpoint": "mini", "devices": "2xcpu", **options})[0]

    def conditioning(self, prompt: str = "a cat", negative: str = "noise", **options: Any) -> Any:
        return self.run(
            "Magi2EncodePrompt", model=self.model(), prompt=prompt, negative_prompt=negative, **options
        )

    def latent(self, **changes: Any) -> Any:
        return self.run("Magi2Sampler", **{**self.sampler_inputs(), **changes})

    def sampler_inputs(self) -> dict[str, Any]:
        size = {"width": 32, "height": 48, "noise_device": "cpu"}
        return {
            "model": self.model(),
            "conditioning": self.conditioning(),
            "resolution": "272p",
            "orientation": "landscape",
            "seed": 7,
            "steps": 3,
            "video_guidance": 5.0,
            "audio_guidance": 7.0,
            "shift": 7.0,
            "options": self.run("Magi2SamplerOptions", **size),
        }


@contextmanager
def graph_in(
    base: Path, interrupt_base: type[BaseException] = Exception, without: tuple[str, ...] = ("refiner",)
) -> Iterator[Graph]:
    """The pack loaded in the stub below `base`, with one checkpoint called mini and pools that have no processes."""
    with installed(base, interrupt_base=interrupt_base) as stub:
        write_checkpoint(base / "models" / "magi2" / "mini", without)
        nodes = stub.nodes()
        manager = stub.module("stages.manager").manager
        graph = Graph(stub, nodes, [], manager)

        def make_pool(model: Any) -> FakePool:
            pool = FakePool(model, stub.module("distributed.pool"))
            pool.refuse_start = graph.refuse_start
            graph.pools.append(pool)
            return pool

        manager._make_pool = make_pool
        yield graph
