"""What a pool is made of: one frozen description, checked before any process starts (80 §12)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .job import PoolError
from .layout import ParallelLayout


@dataclass(frozen=True)
class PoolSpec:
    """Describes a pool; two equal ones mean the same pool.

    engine: "package.module:callable". It is called in each worker as factory(plan, parallel) and returns an object
        with `run(call: str, arguments: dict, events: Events) -> dict`. It must not load weights: that is a call.
    plan: plain values and tensors for the factory. Paths in it are absolute: workers run in another folder.
    layout: its dp is the number of replicas, which share nothing; all other axes divide a replica over its ranks.
    devices: "cpu" or "cuda:N" for each rank of all replicas, in rank order; empty: all on the CPU.
    start_seconds: longest time until every rank has reported, weights not included.
    grace_seconds: how long the ranks may take to stop after a cancel; then they are killed.
    preview_seconds: at most one latent in so many seconds goes with the progress.
    sockets: for workers that torchrun started (hosts.py), where each replica's rank 0 listens; then `devices` is empty,
        because each rank takes the device of its place on its host. Empty: the pool starts workers on this host.
    hidden_paths: folders whose modules workers must not see; under ComfyUI its root.
    """

    engine: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    devices: tuple[str, ...] = ()
    start_seconds: float = 120.0
    grace_seconds: float = 10.0
    preview_seconds: float = 2.0
    sockets: tuple[str, ...] = ()
    hidden_paths: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise PoolError in a sentence for what cannot start."""
        if os.name != "posix":
            raise PoolError("Worker processes need Linux or macOS.")
        module, _, name = self.engine.partition(":")
        if not (module and name):
            raise PoolError(f"'{self.engine}' does not name an engine; write it as package.module:callable.")
        if self.sockets:
            if self.devices or len(self.sockets) != self.layout.dp:
                raise PoolError(
                    f"{len(self.sockets)} sockets and {len(self.devices)} devices are given for {self.layout.dp} "
                    "replicas; give one socket for each replica, and no devices: torchrun places the ranks."
                )
            return
        if not self.devices:
            object.__setattr__(self, "devices", ("cpu",) * self.layout.world)
        if len(self.devices) != self.layout.world:
            raise PoolError(
                f"Layout {self.layout.label} has {self.layout.world} ranks, but {len(self.devices)} devices are given "
                f"({', '.join(self.devices)}); give one for each rank."
            )
        _check_devices(self.devices)


def _check_devices(devices: tuple[str, ...]) -> None:
    wanted = [device for device in devices if device != "cpu"]
    if not wanted:
        return
    present = torch.cuda.device_count()  # does not create a context on a device
    there = f"{present} CUDA devices are visible ({', '.join(f'cuda:{i}' for i in range(present)) or 'none'}"
    there += f"; CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
    known = {f"cuda:{index}" for index in range(present)}
    for device in wanted:
        if device not in known:
            raise PoolError(
                f"{len(devices)} ranks ask for {', '.join(devices)}, but {there}: there is no '{device}'. "
                "Under ComfyUI, start it without --cuda-device or with --cuda-device all."
            )
        if wanted.count(device) > 1:
            raise PoolError(
                f"Device {device} is given for {wanted.count(device)} ranks; each rank needs one of its own. {there}."
            )
