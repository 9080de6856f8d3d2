"""The rank side of the pool: join the group, make the engine, run one call after another (60 §6.3, §6.6)."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import StopPage
from .exchange import ParallelContext
from .layout import ParallelLayout
from .transport import Channel
from .tree import TransportError

MEMORY_SECONDS = 2.0
# The client watches the ranks and ends them all when one fails, so no collective needs a limit of its own.
NO_LIMIT = timedelta(days=7)
_PR_SET_NAME = 15


class Engine(Protocol):
    """What the import path in PoolSpec.engine makes."""

    def run(self, call: str, arguments: dict[str, Any], events: Any) -> dict[str, Any]:
        """Carry out one call; all ranks of a replica run it together, and the first rank's dict is the result.

        Every rank that has a part in the call passes the same number of `events.check()`. A rank without a part returns
        at once, without a check and without sending or receiving anything; so a call of one rank can be stopped, or
        fail, and the replica goes on.
        """


class Stopped(BaseException):
    """Raised by `events.check()` on all ranks together; not an Exception, so that no engine code swallows it."""


class RankEvents:
    """The Events of one job in one rank: progress and lines from rank 0, memory from every rank, common stops."""

    def __init__(
        self, job: int, send: Callable[[dict[str, Any]], None], passes: Callable[[], bool], *, speaks: bool,
        device: torch.device, preview_seconds: float,
    ) -> None:  # fmt: skip
        """`passes`: this rank's next check point, see agreement.py; `speaks`: whether the client hears this rank."""
        self.checks = 0
        self._job, self._send, self._passes, self._speaks = job, send, passes, speaks
        self._device, self._preview_seconds = device, preview_seconds
        self._stage, self._began, self._first = "", 0.0, 0
        self._latent_at, self._memory_at = -preview_seconds, time.monotonic()

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        """Report `done` of `total`; the latent goes along at most every `preview_seconds`."""
        now = time.monotonic()
        self._report_memory(now)
        if not self._speaks:
            return
        if stage != self._stage or done < self._first:
            self._stage, self._began, self._first = stage, now, done
        steps = done - self._first
        seconds_left = (now - self._began) / steps * (total - done) if steps else None
        if latent is not None and now - self._latent_at < self._preview_seconds:
            latent = None
        if latent is not None:
            self._latent_at = now
        report = {"stage": stage, "step": done, "total": total, "seconds_left": seconds_left, "latent": latent}
        self._send({"kind": "progress", "job": self._job, "progress": report})

    def log(self, text: str) -> None:
        """Pass on a line: from rank 0 to the user, from the others to the lines that accompany an error."""
        self._send({"kind": "log", "job": self._job, "level": "INFO", "text": text, "for_user": self._speaks})

    def check(self) -> None:
        """Return, or raise Stopped on every rank at the same check point (agreement.py); a few microseconds."""
        if not self._passes():
            raise Stopped
        self.checks += 1
        self._report_memory(time.monotonic())

    def _report_memory(self, now: float) -> None:
        if now - self._memory_at >= MEMORY_SECONDS:
            self._memory_at = now
            self._send({"kind": "memory", "memory": measure_memory(self._device)})


class LineForwarder(logging.Handler):
    """Sends log records to the client: those of `magi2` from INFO on, all others from WARNING on (60 §6.6)."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(logging.INFO)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.name.partition(".")[0] == "magi2"
        if not ours and record.levelno < logging.WARNING:
            return
        try:
            text = self.format(record)
            self._send({"kind": "log", "level": record.levelname, "text": text, "for_user": True})
        except Exception:  # logging must not break the work
            self.handleError(record)


def serve(channel_file: int, page_file: int, crash_file: int, listener_file: int | None) -> None:
    """Be one worker until the client says quit or is gone. The arguments are open files, see bootstrap.py."""
    faulthandler.enable(crash_file)  # a segmentation fault leaves its stack where the client finds it
    faulthandler.register(signal.SIGUSR1, crash_file)  # the client asks a rank that hangs where it hangs
    channel = Channel(socket.socket(fileno=os.dup(channel_file)), private=True)
    hello = channel.receive()
    _set_process_name(f"magi2-rank{hello['number']}")
    root = logging.getLogger()
    root.addHandler(LineForwarder(channel.send))
    logging.getLogger("magi2").setLevel(logging.INFO)
    device, leads = torch.device(hello["device"]), hello["rank"] == 0
    try:
        parallel = _join(hello, device, listener_file)
        page = StopPage(page_file, parallel.layout.replica, hello["rank"])
        engine = make_engine(hello["engine"], hello["plan"], parallel)
    except BaseException as error:
        channel.send({"kind": "end", "job": 0, "outcome": "failed", "error": describe_error(error)})
        raise
    channel.send({"kind": "memory", "memory": measure_memory(device)})
    channel.send({"kind": "ready", **introduce(device)})
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        if message["kind"] == "quit":
            return
        events = RankEvents(
            message["job"], channel.send, partial(page.passes, message["job"]), speaks=leads, device=device,
            preview_seconds=hello["preview_seconds"],
        )  # fmt: skip
        end = run_call(engine, message, events, device)
        if not leads:
            end["result"] = None
        del message, events  # what the job held is free before the next one comes
        channel.send({"kind": "memory", "memory": measure_memory(device)})
        send_end(channel.send, end)
        del end
        give_back_free_memory()
        channel.send({"kind": "memory", "memory": measure_memory(device)})


def run_call(engine: Engine, message: dict[str, Any], events: RankEvents, device: torch.device) -> dict[str, Any]:
    """Run one call and describe how it ended: done with a result, stopped at a check point, or failed."""
    end: dict[str, Any] = {"kind": "end", "job": message["job"], "usable": True, "result": None, "error": None}
    try:
        end["result"] = engine.run(message["call"], message["arguments"], events)
        end["outcome"] = "done"
    except Stopped:
        end["outcome"] = "stopped"
    except BaseException as error:  # whatever it is, the client must hear of it
        end["outcome"], end["error"] = "failed", describe_error(error)
    end["checks"] = events.checks
    if end["outcome"] != "done":
        gc.collect()  # the exception's frames held the work's tensors
        end["usable"] = _device_works(device)
    return end


def send_end(send: Callable[[dict[str, Any]], None], end: dict[str, Any]) -> None:
    """Send how a job ended; a result that cannot cross is a failure of its own."""
    try:
        send(end)
    except TransportError as error:
        send({**end, "result": None, "outcome": "failed", "error": describe_error(error)})


def make_engine(path: str, plan: dict[str, Any], parallel: ParallelContext) -> Engine:
    """Call the factory named by "package.module:callable"."""
    engine: Engine = find(path)(plan, parallel)
    return engine


def find(path: str) -> Callable[..., Any]:
    """What "package.module:callable" names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def describe_error(error: BaseException) -> dict[str, Any]:
    """An exception as text: exception objects do not cross, they may not be importable on the other side."""
    return {
        "type": type(error).__name__,
        "message": str(error) or "(no message)",
        "traceback": "".join(traceback.format_exception(error)),
        "time": time.monotonic(),  # one clock for all processes of a host
    }


def measure_memory(device: torch.device) -> dict[str, int | None]:
    """Bytes resident in this process, and in tensors and held by torch on its device."""
    if device.type != "cuda":
        return {"resident": resident_bytes(), "allocated": None, "reserved": None}
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"resident": resident_bytes(), "allocated": allocated, "reserved": reserved}


def give_back_free_memory() -> None:
    """Return to the system what the C library keeps of freed tensors; a rank would grow by it job by job (80 §14)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def resident_bytes() -> int:
    """Bytes of host memory that this process occupies now; where the system does not tell, at its highest."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def introduce(device: torch.device) -> dict[str, Any]:
    """What a rank says of itself when it is ready."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"pid": os.getpid(), "device": str(device), "device_name": name}


def _join(hello: dict[str, Any], device: torch.device, listener_file: int | None) -> ParallelContext:
    """Set the device, meet the other ranks of the replica over loopback, and make the groups."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    layout, rank = ParallelLayout(**hello["layout"]), hello["rank"]
    if layout.replica > 1:
        store = dist.TCPStore(
            "127.0.0.1", hello["port"], layout.replica, is_master=rank == 0, timeout=NO_LIMIT, wait_for_workers=False,
            master_listen_fd=None if listener_file is None else os.dup(listener_file),
        )  # fmt: skip
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=layout.replica, timeout=NO_LIMIT)
    # A replica is a world of its own; the engine is told its place in the whole layout all the same.
    own = ParallelContext.create(replace(layout, dp=1), rank, device)
    return replace(own, layout=layout, rank=hello["number"])


def _device_works(device: torch.device) -> bool:
    """Whether the device still computes after a failure; some errors spoil it for the life of the process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def _set_process_name(name: str) -> None:
    """Show in process lists which rank this is (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
