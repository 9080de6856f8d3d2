"""Run a function on several gloo ranks of this machine, and count what they send to each other.

The ranks are forked, because a fork inherits the imported torch: four of them start in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "irecv", "isend", "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, deadline: float = 60.0) -> list[Any]:
    """Call `function(rank, *arguments)` on `world` ranks with a gloo group; return their results in rank order.

    Raises AssertionError with the traceback of the rank that failed first, or with the ranks that did not end within
    `deadline` seconds. No rank outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_rank, args=(rank, world, folder, deadline, function, arguments), daemon=True)
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            _wait(ranks, folder, time.monotonic() + deadline)
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _wait(ranks: list[BaseProcess], folder: Path, end: float) -> None:
    while True:
        alive = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        # The rank that failed first is the cause; the others fail because it left.
        if errors := sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns):
            raise AssertionError(f"Rank {errors[0].stem} failed:\n{errors[0].read_text()}")
        if dead := [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]:
            raise AssertionError(f"Rank {dead[0]} died with exit code {ranks[dead[0]].exitcode}.")
        if not alive:
            return
        if time.monotonic() > end:
            raise AssertionError(f"Ranks {alive} of {len(ranks)} did not end in time.")
        ranks[alive[0]].join(0.02)


def _rank(
    rank: int, world: int, folder: Path, deadline: float, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)  # the parent's thread pool does not survive the fork
    try:
        dist.init_process_group(
            "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=deadline)
        )
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        unfinished = folder / f"{rank}.unfinished"
        unfinished.write_text(traceback.format_exc())
        unfinished.rename(folder / f"{rank}.error")
        os._exit(1)


@dataclass
class Traffic:
    """The collectives that this rank called, in order, and the bytes that it put into each of them."""

    calls: list[str] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def count(self, name: str) -> int:
        return self.calls.count(name)


@contextlib.contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Record every torch.distributed collective of this process while the block runs."""
    traffic = Traffic()
    originals = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def record(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            # The input follows the output in all-to-all and gather; a reduction has one tensor.
            tensors = [value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)]
            traffic.calls.append(name)
            traffic.sent.append(tensors[-1].numel() * tensors[-1].element_size() if tensors else 0)
            return originals[name](*arguments, **keywords)

        return call

    try:
        for name in originals:
            setattr(dist, name, record(name))
        yield traffic
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
