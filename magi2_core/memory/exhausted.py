"""A device that ran out of memory, as a sentence: which one, in which call, how much, and what would lower it."""

from __future__ import annotations

import re

import torch

from ..errors import DeviceMemoryError
from .plan import Plan

_OTHERS = 1 << 28  # what other programs hold is named from here on


def out_of_memory(error: torch.OutOfMemoryError, call: str, device: torch.device, plan: Plan) -> DeviceMemoryError:
    """The error to raise instead of torch's own, which names neither the call nor a setting."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    more = f" {asked[1]} more were asked for." if asked else ""
    return DeviceMemoryError(f"{device} ran out of memory in {call!r}.{more}{_held(device)} {_advice(call, plan)}")


def _held(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    others = total - free - ours
    beside = f" and {_gib(others)} by other programs and the driver" if others > _OTHERS else ""
    return f" Of its {_gib(total)}, {_gib(ours)} are held by this worker{beside}."


def _advice(call: str, plan: Plan) -> str:
    """The settings that lower what the call takes, in the words of the loader, the least costly first."""
    ways = ["end other programs on this device"]
    if plan.residency == "keep":
        ways.insert(0, "set residency to swap, so that it holds one network at a time")
    if call == "refine" and plan.refiner_residual == "float32":
        ways.append("set refiner_residual to bfloat16")
    if call in ("sample", "refine", "load"):
        ways.append("use more devices, each of which then holds a smaller share")
    if call != "encode_text":
        ways.append("choose a smaller resolution")
    return f"What lowers it: {'; '.join(ways)}."


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
