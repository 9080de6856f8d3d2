"""Weights from disk to the device: strict, in slices, without a second copy (10 §12.2, 70 §7)."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...distributed.layout import RankShare
from ..dit.rope import rotary_bands
from ..errors import CheckpointError
from ..events import SILENT, Events
from .network import BANDS, Network
from .problem import SHOWN
from .reader import TensorReader
from .shard import Region, local_shape, local_slices, region_shape

log = logging.getLogger("magi2")

# Enough to keep an NVMe disk busy; each may hold one staging buffer.
_READERS = 4
# Bytes read at once: bounds the staging memory, and the time until a cancelled load stops.
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Loaded:
    """What one load read from disk: bytes of this rank's slices, and files, each opened once."""

    bytes_read: int
    files_opened: int
    seconds: float


def load_module(
    module: nn.Module,
    network: Network,
    *,
    share: RankShare | None = None,
    device: torch.device | str = "cpu",
    events: Events = SILENT,
    stage: str = "load",
) -> Loaded:
    """Fill a module that was built on the meta device with this rank's slices of a network.

    The module's `state_dict` may lack keys of the network (weights that are streamed by someone else), but not have
    others. Each tensor takes the dtype and local shape of the module's own. `events.check()` is called once for every
    tensor, in the same order on all ranks. Raises CheckpointError if the folder does not hold the network.
    """
    wanted = module.state_dict()
    if unknown := wanted.keys() - network.table.keys():
        raise CheckpointError(f"The {network.name} has no tensor {sorted(unknown)[0]!r}; the module does not fit it.")
    for key, tensor in wanted.items():
        if tuple(tensor.shape) != (shape := local_shape(network.table[key], share)):
            raise CheckpointError(f"{key}: the module has shape {tuple(tensor.shape)}, this rank's share is {shape}.")
    _warn(network)
    started = time.monotonic()
    with network.open() as reader:
        dtypes = {key: tensor.dtype for key, tensor in wanted.items()}
        tensors = load_tensors(network, reader, dtypes, share=share, device=device, events=events, stage=stage)
        loaded = Loaded(reader.bytes_read, reader.files_opened, time.monotonic() - started)
    module.requires_grad_(False)
    module.load_state_dict(tensors, strict=True, assign=True)
    log.info("%s: read %.2f GB from %d files in %.1f s", network.name, loaded.bytes_read / 1e9, loaded.files_opened,
             loaded.seconds)  # fmt: skip
    return loaded


def load_tensors(
    network: Network,
    reader: TensorReader,
    dtypes: Mapping[str, torch.dtype],
    *,
    share: RankShare | None = None,
    device: torch.device | str = "cpu",
    events: Events = SILENT,
    stage: str = "load",
) -> dict[str, Tensor]:
    """This rank's slices of the tensors named in `dtypes`, in those dtypes, on `device` (see load_module)."""
    stop = threading.Event()
    source_of = _router_bias_source()
    staging = _Staging(torch.device(device))
    tensors: dict[str, Tensor] = {}

    def read(key: str) -> Tensor:
        regions = local_slices(network.table[key], share)
        tensor = torch.empty(local_shape(network.table[key], share), dtype=dtypes[key], device=device)
        stored = network.entries[source_of(key)].dtype
        direct = tensor.device.type == "cpu" and tensor.dtype == stored
        for chunk, target in _chunks(regions, tensor, stored.itemsize):
            if stop.is_set():
                break
            buffer = target if direct else staging.buffer(region_shape(chunk), stored)
            reader.read(source_of(key), chunk, buffer)
            if not direct:
                target.copy_(buffer)
        return tensor

    present = [key for key in dtypes if source_of(key) in network.entries]
    # In the order of the files, so that a disk reads forward.
    present.sort(key=lambda key: (str(network.entries[key].file), network.entries[key].begin))
    with closing(_in_order(present, read, stop)) as results:
        for key, tensor in results:
            tensors[key] = tensor
            events.check()
            events.progress(stage, len(tensors), len(present))
    if BANDS in dtypes:
        _check_bands(tensors, network, dtypes[BANDS], torch.device(device), events)
    return tensors


def _router_bias_source() -> Callable[[str], str]:
    """Which stored key fills a key of the model: `expert_bias` is filled from `expert_bias_ema` (10 §12.2).

    The environment variable MAGI2_ROUTER_BIAS_SOURCE may say "main" to keep `expert_bias`; CheckpointError for a value
    that is neither that nor "ema".
    """
    choice = os.environ.get("MAGI2_ROUTER_BIAS_SOURCE", "").strip().lower() or "ema"
    if choice not in ("ema", "main"):
        raise CheckpointError(f"MAGI2_ROUTER_BIAS_SOURCE is {choice!r}; it must be 'ema' (the default) or 'main'.")

    def source_of(key: str) -> str:
        return f"{key}_ema" if choice == "ema" and key.endswith(".router.expert_bias") else key

    return source_of


def _warn(network: Network) -> None:
    """Name the keys that nothing needs, once for all of them (10 §12.2)."""
    stray = [problem.key or str(problem.file) for problem in network.problems if problem.warning]
    if stray:
        more = ", …" if len(stray) > SHOWN else ""
        log.warning("%s: %d keys are not needed and ignored: %s%s", network.name, len(stray),
                    ", ".join(stray[:SHOWN]), more)  # fmt: skip


def _in_order(
    keys: list[str], read: Callable[[str], Tensor], stop: threading.Event
) -> Generator[tuple[str, Tensor], None, None]:
    """Read with a few threads, at most a few tensors ahead, and give the results in the order of `keys`."""
    with ThreadPoolExecutor(_READERS, thread_name_prefix="magi2-load") as pool:
        pending: deque[tuple[str, Future[Tensor]]] = deque()
        try:
            for key in keys:
                pending.append((key, pool.submit(read, key)))
                if len(pending) > _READERS:
                    first, future = pending.popleft()
                    yield first, future.result()
            while pending:
                first, future = pending.popleft()
                yield first, future.result()
        finally:
            # Also reached when the caller stops taking results: cancel, an unreadable file.
            stop.set()
            for _, future in pending:
                future.cancel()


class _Staging(threading.local):
    """One small buffer for each reading thread, for tensors that are cast or copied to a device on their way."""

    def __init__(self, device: torch.device):
        self._pinned = device.type == "cuda"
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if self._bytes.numel() < size:
            self._bytes = torch.empty(max(size, _CHUNK), dtype=torch.uint8, pin_memory=self._pinned)
        return self._bytes[:size].view(dtype).view(shape)


def _chunks(regions: tuple[Region, ...], tensor: Tensor, itemsize: int) -> Iterator[tuple[Region, Tensor]]:
    """The regions in pieces of some rows each, with the rows of `tensor` that each piece fills."""
    if not tensor.shape:
        yield (), tensor
        return
    step = max(1, _CHUNK // max(1, math.prod(tensor.shape[1:]) * itemsize))
    row = 0
    for rows, *rest in regions:
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            yield (slice(start, stop), *rest), tensor[row : row + stop - start]
            row += stop - start


def _check_bands(
    tensors: dict[str, Tensor], network: Network, dtype: torch.dtype, device: torch.device, events: Events
) -> None:
    """Supply missing rotary bands by their formula, and report stored ones that differ from it (50 §4)."""
    bands = rotary_bands(8 * network.table[BANDS].shape[0]).to(dtype)
    if BANDS not in tensors:
        tensors[BANDS] = bands.to(device)
    elif (difference := (tensors[BANDS].cpu() - bands).abs().max().item()) > 0:
        text = f"{network.name}: {BANDS} differs from its formula by up to {difference:.1e}; the file counts."
        log.warning(text)
        events.log(text)
