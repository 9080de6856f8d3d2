"""What the node tests share: the stub with a fake pool behind the nodes, and a checkpoint folder to choose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import Stub, execute, installed
from .fake_pool import FakePool

SMALL_ARCHITECTURE = {
    "num_layers": 2,
    "hidden_size": 96,
    "head_dim": 8,
    "num_query_groups": 12,
    "text_in_channels": 8,
    "mm_layers": [0],
    "moe_config": {
        "num_heads": 12,
        "num_experts": 8,
        "top_k": 2,
        "moe_layers": [1],
        "expert_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "modality_specific_expert_intermediate_size": 16,
    },
}


def write_checkpoint(root: Path) -> Path:
    """A folder that can be chosen and planned for; it holds no weights."""
    (root / "preview").mkdir(parents=True)
    (root / "preview" / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (root / "magi2_preview.json").write_text(json.dumps({"arch_config": SMALL_ARCHITECTURE}))
    return root


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
def graph_in(base: Path, interrupt_base: type[BaseException] = Exception) -> Iterator[Graph]:
    """The pack loaded in the stub below `base`, with one checkpoint called mini and pools that have no processes."""
    with installed(base, interrupt_base=interrupt_base) as stub:
        write_checkpoint(base / "models" / "magi2" / "mini")
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
