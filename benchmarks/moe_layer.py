"""Where one MoE layer spends its time under a parallel layout: attention, stream mixing and experts, part by part.

    python -m magi2_native.benchmarks.moe_layer --layout sp2

Runs the layer of the model itself on every rank, with random weights, and notes each time it turns to another part. A
line gives the median, least and largest time of a part over the rounds, each round taken from its slowest rank, and the
part's share. An exchange includes the wait for the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.exchange import ParallelContext
from ..distributed.layout import LayoutError, ModelShape, ParallelLayout, check_layout
from ..magi2_core.config import MoeConfig, PreviewConfig
from ..magi2_core.dit import attention, mlp, model, moe
from ..magi2_core.dit.inputs import PackedLayout
from ..magi2_core.dit.prepare import Prepared, prepare
from ..magi2_core.dit.rope import rotary_bands
from ..magi2_core.kernels import experts
from ..magi2_core.precision import true_fp32
from ..magi2_core.sampling.packing import BranchShape, pack_layout

RELEASED = PreviewConfig(num_layers=1, mm_layers=(), moe=MoeConfig(moe_layers=(0,)))
# The released head counts, so that every layout divides it, at a size for any machine.
SMALL = replace(
    RELEASED,
    hidden_size=384,
    head_dim=16,
    moe=MoeConfig(
        moe_layers=(0,),
        num_experts=16,
        top_k=4,
        expert_intermediate_size=80,
        shared_expert_intermediate_size=80,
        modality_specific_expert_intermediate_size=80,
    ),
)

# (part, component) in the order of the layer. Reductions happen under tensor parallelism only.
COMPONENTS = (
    ("mHC", "norm + projection"), ("mHC", "coefficients"), ("mHC", "read"), ("mHC", "write"),
    ("attention", "norm"), ("attention", "qkv"), ("attention", "norm + rope"), ("attention", "exchange"),
    ("attention", "core"), ("attention", "exchange back"), ("attention", "gate + proj"), ("attention", "reduce"),
    ("MoE", "norm"), ("MoE", "split"), ("MoE", "shared branch"), ("MoE", "dispatch"), ("MoE", "routing"),
    ("MoE", "experts"), ("MoE", "combine"), ("MoE", "undispatch"), ("MoE", "merge"), ("MoE", "reduce"),
)  # fmt: skip
Component = tuple[str, str]

# Work on one of these weights starts the component.
_WEIGHTS: dict[str, Component] = {
    "mhc_norm": ("mHC", "norm + projection"),
    "attention.pre_norm": ("attention", "norm"),
    "attention.linear_qkv": ("attention", "qkv"),
    "attention.linear_g": ("attention", "qkv"),
    "attention.q_norm": ("attention", "norm + rope"),
    "attention.k_norm": ("attention", "norm + rope"),
    "attention.linear_proj": ("attention", "gate + proj"),
    "mlp.pre_norm": ("MoE", "norm"),
    "mlp.split_linear": ("MoE", "split"),
    "mlp.shared_expert_fc1": ("MoE", "shared branch"),
    "mlp.shared_expert_fc2": ("MoE", "shared branch"),
    "mlp.modality_specific_shared_expert_fc1": ("MoE", "shared branch"),
    "mlp.modality_specific_shared_expert_fc2": ("MoE", "shared branch"),
    "mlp.moe_mlp.gate": ("MoE", "routing"),
    "mlp.merge_linear": ("MoE", "merge"),
}
_ON_WEIGHTS = ((model, "rms_norm"), (attention, "rms_norm"), (mlp, "rms_norm"))
# Every call of one of these functions starts the component.
_FUNCTIONS: dict[tuple[ModuleType, str], Component] = {
    (model, "coefficients"): ("mHC", "coefficients"),
    (model, "branch_input"): ("mHC", "read"),
    (model, "update_streams_"): ("mHC", "write"),
    (attention, "scatter_qkv"): ("attention", "exchange"),
    (attention, "attend"): ("attention", "core"),
    (attention, "scatter_tokens_gather_heads"): ("attention", "exchange back"),
    (attention, "head_gate_"): ("attention", "gate + proj"),
    (attention, "all_reduce_sum"): ("attention", "reduce"),
    (mlp, "dispatch_heads"): ("MoE", "dispatch"),
    (moe, "route"): ("MoE", "routing"),
    (moe, "head_experts"): ("MoE", "experts"),
    (mlp, "combine_heads"): ("MoE", "undispatch"),
    (mlp, "all_reduce_sum"): ("MoE", "reduce"),
}


class Watch:
    """Notes when the layer turns to another component; a component lasts until the next one starts.

    On CUDA the notes are events in the stream, so that nothing waits for the device until `milliseconds`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.notes: list[tuple[Component | None, Any]] = []

    def start(self, component: Component | None) -> None:
        """The layer turns to `component`; None: it has ended."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.notes.append((component, event))
        else:
            self.notes.append((component, time.perf_counter()))

    def milliseconds(self) -> dict[Component, float]:
        """Time of each component since the last call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        total = dict.fromkeys(COMPONENTS, 0.0)
        for (component, begin), (_, end) in zip(self.notes, self.notes[1:], strict=False):
            if component is not None:
                cuda = self.device.type == "cuda"
                total[component] += begin.elapsed_time(end) if cuda else (end - begin) * 1e3
        self.notes.clear()
        return total


class _Functional:
    """torch.nn.functional as one module of the model sees it, with some of its functions replaced."""

    def __init__(self, replaced: dict[str, Callable[..., Any]]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(nn.functional, name)


@contextlib.contextmanager
def watched(layer: nn.Module, watch: Watch) -> Iterator[None]:
    """Make the functions that the layer calls note the component they belong to, while the block runs.

    A weight of the layer that no component knows is a KeyError: the tables above have then missed a change.
    """
    name_of = {
        tensor.untyped_storage().data_ptr(): name.removesuffix(".weight") for name, tensor in layer.named_parameters()
    }

    def on_weight(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, weight: Tensor, *arguments: Any, **keywords: Any) -> Any:
            watch.start(_WEIGHTS[name_of[weight.untyped_storage().data_ptr()]])
            return function(x, weight, *arguments, **keywords)

        return call

    def always(function: Callable[..., Any], component: Component) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            watch.start(component)
            return function(*arguments, **keywords)

        return call

    linear = {"linear": on_weight(nn.functional.linear)}
    summed = {"embedding_bag": always(nn.functional.embedding_bag, ("MoE", "combine"))}
    replaced: dict[tuple[ModuleType, str], Any] = {(place, "F"): _Functional(linear) for place in (attention, mlp, moe)}
    replaced[experts, "F"] = _Functional(summed)
    replaced |= {(place, name): on_weight(getattr(place, name)) for place, name in _ON_WEIGHTS}
    replaced |= {(place, name): always(getattr(place, name), what) for (place, name), what in _FUNCTIONS.items()}
    originals = {(place, name): getattr(place, name) for place, name in replaced}
    try:
        for (place, name), function in replaced.items():
            setattr(place, name, function)
        yield
    finally:
        for (place, name), function in originals.items():
            setattr(place, name, function)


@dataclass(frozen=True)
class Options:
    """What is measured. `tokens` counts both guidance branches together; `device` is a torch device type."""

    layout: ParallelLayout
    tokens: int = 4096
    rounds: int = 20
    warm_up: int = 3
    released: bool = False
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"


@dataclass(frozen=True)
class Line:
    """One component over all rounds, in milliseconds of the slowest rank; `share` of the whole layer."""

    part: str
    component: str
    median: float
    least: float
    most: float
    share: float


def measure(rank: int, options: Options) -> list[Line]:
    """Run the layer on this rank, with the process group already there; the same lines on every rank."""
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    parallel = ParallelContext.create(options.layout, rank)
    config = replace(RELEASED if options.released else SMALL, params_dtype=options.dtype)
    layer, prepared = _layer(config, parallel, device), _prepared(config, parallel, options.tokens, device)
    generator = torch.Generator(device).manual_seed(rank)
    shape = (prepared.split.local, config.stream_width)
    start_SW = torch.randn(shape, generator=generator, device=device).to(options.dtype)
    watch = Watch(device)
    rounds: list[dict[Component, float]] = []
    with torch.inference_mode(), true_fp32(), watched(layer, watch):
        for _ in range(options.warm_up + options.rounds):
            streams_SW = start_SW.clone()
            if options.layout.world > 1:
                dist.barrier()  # all ranks begin together
            layer(streams_SW, prepared)
            watch.start(None)
            rounds.append(watch.milliseconds())
    return _lines(slowest(rounds[options.warm_up :], options.layout.world))


def _layer(config: PreviewConfig, parallel: ParallelContext, device: torch.device) -> nn.Module:
    """The model's only layer, with this rank's shapes and random weights that keep activations near 1."""
    with torch.device("meta"):
        whole = model.PreviewTransformer(config, parallel, compute_dtype=config.params_dtype)
    layer: nn.Module = whole.block.layers[0].to_empty(device=device)
    for name, weight in layer.named_parameters():
        if "norm" in name:
            weight.data.zero_()
        else:
            fan_in = 1 if weight.ndim < 2 else weight.shape[0] if "phi" in name else weight.shape[1]
            weight.data.normal_(std=fan_in**-0.5)
    return layer


def _prepared(config: PreviewConfig, parallel: ParallelContext, tokens: int, device: torch.device) -> Prepared:
    """Two guidance branches as in a clip: mostly video, then sound and text; no more than `tokens` rows."""
    text = max(1, tokens // 40)
    sound = max(1, tokens // 40)
    frames = 4
    pixels = max(1, (tokens // 2 - text - sound) // frames)
    layout: PackedLayout = pack_layout((frames, 1, pixels), sound, [BranchShape(text), BranchShape(text)])
    return prepare(config, layout, parallel, rotary_bands(config.head_dim), device)


def slowest(own: list[dict[Component, float]], world: int) -> list[dict[Component, float]]:
    """For each round and component the time of the rank that took longest."""
    ranks: list[list[dict[Component, float]]] = [own] * world
    if world > 1:
        dist.all_gather_object(ranks, own)
    return [{name: max(times[name] for times in same) for name in COMPONENTS} for same in zip(*ranks, strict=True)]


def _lines(rounds: list[dict[Component, float]]) -> list[Line]:
    medians = {name: statistics.median(times[name] for times in rounds) for name in COMPONENTS}
    whole = sum(medians.values())
    return [
        Line(part, component, median, min(times[part, component] for times in rounds),
             max(times[part, component] for times in rounds), median / whole)
        for (part, component), median in medians.items()
    ]  # fmt: skip


def table(lines: list[Line]) -> str:
    """The lines as text, each part followed by its sum; components that did not run are left out."""
    rows = [f"{'':10}{'':20}{'median ms':>10}{'min':>10}{'max':>10}{'share':>8}"]
    for part in dict.fromkeys(line.part for line in lines):
        own = [line for line in lines if line.part == part and line.most > 0]
        for line in own:
            rows.append(f"{line.part:10}{line.component:20}{line.median:10.3f}{line.least:10.3f}{line.most:10.3f}"
                        f"{line.share:8.1%}")  # fmt: skip
        rows.append(f"{part:10}{'all of it':20}{sum(line.median for line in own):10.3f}{'':20}"
                    f"{sum(line.share for line in own):8.1%}")  # fmt: skip
    return "\n".join(rows)


def _rank(rank: int, folder: str, options: Options) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.layout.world))
    if options.layout.world > 1:
        backend, world = ("nccl" if options.device == "cuda" else "gloo"), options.layout.world
        dist.init_process_group(backend, f"file://{folder}/rendezvous", rank=rank, world_size=world)
    lines = measure(rank, options)
    if rank == 0:
        Path(folder, "lines.json").write_text(json.dumps([asdict(line) for line in lines]))
    if options.layout.world > 1:
        dist.destroy_process_group()


def run(options: Options) -> list[Line]:
    """Measure in one new process for each rank."""
    with tempfile.TemporaryDirectory(prefix="moe-layer-") as folder:
        torch.multiprocessing.spawn(_rank, (folder, options), nprocs=options.layout.world)
        return [Line(**line) for line in json.loads(Path(folder, "lines.json").read_text())]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where one MoE layer spends its time under a parallel layout.")
    parser.add_argument("--layout", default="sp1", help="sp2, tp2sp2, … (default sp1)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of both guidance branches (default 4096)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--size", choices=("small", "released"), default="small", help="sizes of the layer")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print the lines as JSON")
    given = parser.parse_args(arguments)
    if given.tokens < 16 or given.rounds < 1:
        parser.error("at least 16 tokens and one round are needed.")
    try:
        layout = ParallelLayout.parse(given.layout)
        check_layout(layout, ModelShape(), torch.cuda.device_count() if given.device == "cuda" else layout.world)
    except LayoutError as error:
        parser.error(str(error))
    lines = run(
        Options(
            layout, given.tokens, given.rounds, released=given.size == "released", dtype=getattr(torch, given.dtype),
            device=given.device,
        )
    )  # fmt: skip
    if given.json:
        print(json.dumps([asdict(line) for line in lines]))
    else:
        print(f"{given.size} layer, {layout.label}, {given.tokens} tokens, {given.dtype} on {given.device}, "
              f"{given.rounds} rounds")  # fmt: skip
        print(table(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
