"""What a worker inherits from its parent, and what it must not (60 §6.4). Standard library only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, MutableMapping

_RENDEZVOUS = (
    "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
)  # fmt: skip


def clean_environment(environment: MutableMapping[str, str], ranks: int) -> None:
    """Make a copy of the parent's environment fit for one of `ranks` local workers; changes it in place.

    Another launcher's rendezvous goes; so does torch's cudaMallocAsync allocator, which ComfyUI asks for and which
    excludes the options a large model wants. The user's other allocator options stay. gloo speaks over loopback, and
    workers share the processor cores instead of each taking all of them.
    """
    for name in list(environment):
        if name in _RENDEZVOUS or name.startswith("TORCHELASTIC_"):
            del environment[name]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        items = environment.pop(name, "").split(",")
        kept = [item for item in items if item.strip().lower() not in ("", "backend:cudamallocasync")]
        if kept:
            environment[name] = ",".join(kept)
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // ranks)))


def worker_path(path: Iterable[str], hidden: Iterable[str]) -> list[str]:
    """The entries of `path` (sys.path) that workers may import from: none inside a folder of `hidden`.

    An application's root holds modules with common names (`utils`, `nodes`, `server`) that would shadow others. Folders
    of installed packages stay even there: virtual environments often stand inside the application's folder. Relative
    entries go, because workers run in another folder.
    """
    roots = [os.path.realpath(folder) for folder in hidden]

    def allowed(entry: str) -> bool:
        if not os.path.isabs(entry):
            return False
        real = os.path.realpath(entry)
        inside = any(os.path.commonpath([real, root]) == root for root in roots)
        return not inside or os.path.basename(real) in ("site-packages", "dist-packages") or _is_standard(real)

    return [entry for entry in path if allowed(entry)]


def _is_standard(folder: str) -> bool:
    """Whether this is a folder (or the zip file) of the interpreter's standard library."""
    libraries = {os.path.realpath(os.path.dirname(os.__file__))}
    return folder in libraries or os.path.dirname(folder) in libraries or os.path.basename(folder).startswith("python3")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
