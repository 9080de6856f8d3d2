"""What the machine offers: devices, and the memory that each has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import RequestError

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Place:
    """Where a rank runs: a device, the bytes of memory that it may count on there, and the host, "" for this one."""

    device: str
    memory: int
    host: str = ""


def describe_place(device: torch.device) -> dict[str, Any]:
    """`device` and `memory` of a Place: what a rank that torchrun started answers to who plans for it."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if device.type == "cpu" else 1
    return {"device": str(device), "memory": device_memory(str(device)) // ranks}


def choose_devices(asked: Sequence[str] | None) -> tuple[str, ...]:
    """Check a list of devices such as ("cuda:0", "cuda:1") or ("cpu", "cpu"); None means every GPU, else one CPU rank.

    "cuda" alone means all CUDA devices. A GPU may serve one rank only; "cpu" may be repeated, one rank each. Raises
    RequestError that lists what there is (80 line 12).
    """
    count = torch.cuda.device_count()
    there = [f"cuda:{i}" for i in range(count)]
    if asked is None:
        return tuple(there) or ("cpu",)
    devices: list[str] = []
    for name in asked:
        devices += there if name == "cuda" and there else [name]
    for name in devices:
        if name != "cpu" and name not in there:
            listed = ", ".join([*there, "cpu"])
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            hint = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
            raise RequestError(f"Device {name!r} is not here; this process sees {listed}{hint}.")
        if name != "cpu" and devices.count(name) > 1:
            raise RequestError(f"Device {name!r} is asked for twice; each rank needs a GPU of its own.")
    if not devices:
        raise RequestError("The device list is empty; name at least one device, for example cuda:0 or cpu.")
    return tuple(devices)


def device_memory(device: str) -> int:
    """Total bytes of a GPU, or of the host for "cpu" (the container's limit where that is lower)."""
    if device != "cpu":
        return torch.cuda.get_device_properties(torch.device(device)).total_memory
    return host_memory()


def host_memory() -> int:
    """Bytes of host memory that this process may use: physical memory or the control group's limit."""
    total = physical_memory()
    for limit in CGROUP_LIMITS:
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def physical_memory() -> int:
    """Bytes of memory in this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def working_budget(device: torch.device) -> int:
    """Bytes that a decoder's tile may count on: most of what is free on a GPU.

    On the host 256 MiB: a process takes up to twice what is counted, and a 1080p clip is to be saved within 1.5 GB.
    """
    if device.type != "cuda":
        return 256 << 20
    free, _ = torch.cuda.mem_get_info(device)
    return int(0.8 * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)))
