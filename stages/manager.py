"""The one place that knows whether a pool of workers is running, and for which model.

Values on the graph never hold a pool. Each stage asks here, every time, to run a call for a model; a pool that is
gone, broken or made for another model is replaced first (60 §5).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..distributed.pool import Pool
from ..magi2_core.errors import RequestError
from ..magi2_core.events import SILENT, Events
from .session import pool_spec, run_on_pool
from .values import Model

logger = logging.getLogger("magi2")

LOG_LINES = 50


class PoolManager:
    """Owns at most one pool. `run` may be called from any thread; calls run one after the other.

    `before_start` is called with the model just before workers start, `before_job` before the first job of workers, in
    its thread, `changed` whenever the status changes; the node layer uses them to make room on the GPUs and to tell the
    page.
    """

    def __init__(self, make_pool: Callable[[Model], Pool] | None = None) -> None:
        self._make_pool = make_pool or (lambda model: Pool(pool_spec(model.plan, self.hidden_paths)))
        self._job_lock = threading.RLock()
        self._pool: Pool | None = None
        self._model: Model | None = None
        self._unused = False  # whether the pool has had no job yet
        self._state = "stopped"
        self._progress: dict[str, Any] | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._idle_timer: threading.Timer | None = None
        self.idle_minutes = 0.0
        self.hidden_paths: tuple[str, ...] = ()
        self.runs = 0
        self.clips: set[Path] = set()  # temporary files that ComfyUI's cache may still name
        self.before_start: Callable[[Model], None] = lambda model: None
        self.before_job: Callable[[Model], None] = lambda model: None
        self.changed: Callable[[], None] = lambda: None

    def run(self, model: Model, call: str, arguments: dict[str, Any], events: Events) -> dict[str, Any]:
        """Run one engine call for `model`, starting its pool if needed, and return the result.

        What `events` raise stops the job on every rank and passes through untouched; a worker's failure raises
        the pool's error. In both cases the next call finds a pool that works.
        """
        while not self._job_lock.acquire(timeout=0.1):  # the panel may be starting workers
            events.check()
        try:
            self._cancel_idle()
            pool = self._ready(model, events)
            try:
                if self._unused:
                    self.before_job(model)
                    self._unused = False
                self._set("busy", stage=call)
                return run_on_pool(pool, call, arguments, _Watched(events, self))
            finally:
                self.runs += 1
                self._set("ready" if pool.alive else "stopped")
                self._await_idle()
        finally:
            self._job_lock.release()

    def start(self, patience_s: float = -1) -> None:
        """Start workers again for the model that ran last; RequestError if none ever ran or a job is running."""
        with self._exclusive(patience_s):
            if self._model is None:
                raise RequestError("No model has been used yet; run a workflow once, then the workers can be started.")
            self._ready(self._model, SILENT)
            self._await_idle()

    def unload(self, patience_s: float = -1) -> bool:
        """Let the workers free all weights but stay alive; False if there are none. RequestError if a job is running
        and does not end within `patience_s` (-1: wait for it)."""
        with self._exclusive(patience_s):
            if self._pool is None or not self._pool.alive:
                return False
            run_on_pool(self._pool, "release", {}, _Watched(SILENT, self))
            self._set("unloaded")
            return True

    def stop(self, patience_s: float = -1) -> bool:
        """End the workers, which frees everything they hold; False if there were none. RequestError as `unload`."""
        with self._exclusive(patience_s):
            self._cancel_idle()
            pool, self._pool = self._pool, None
            if pool is None:
                return False
            pool.close()
            self._set("stopped")
            return True

    def stop_when_idle(self, minutes: float) -> None:
        """End workers that have had no job for so many minutes from now; 0 keeps them."""
        self.idle_minutes = minutes
        if self._job_lock.acquire(blocking=False):  # else the end of the running job starts the clock
            try:
                self._await_idle()
            finally:
                self._job_lock.release()

    @property
    def alive(self) -> bool:
        """Whether workers are running; never waits for a job."""
        pool = self._pool
        return pool is not None and pool.alive

    def status(self) -> dict[str, Any]:
        """What the page shows: no file paths, environment or keys (60 §11). Never waits for a job."""
        model, pool, alive = self._model, self._pool, self.alive
        workers = [rank for replica in pool.status()["replicas"] for rank in replica["ranks"]] if pool and alive else []
        measured = {worker["rank"]: worker for worker in workers}
        return {
            "state": "stopped" if not alive and self._state in ("ready", "unloaded") else self._state,
            "model": model.name if model else None,
            "layout": model.plan.layout if model else None,
            "dtype": model.plan.dtype if model else None,
            "ranks": [
                {
                    "rank": number,
                    "device": rank.device,
                    "device_name": measured.get(number, {}).get("device_name", ""),
                    "planned": rank.needed,
                    "memory": rank.memory,
                    "used": measured.get(number, {}).get("memory"),
                }
                for number, rank in enumerate(model.plan.ranks if model else ())
            ],
            "progress": self._progress,
            "log": list(self._log),
        }

    def note(self, text: str) -> None:
        """Keep a log line for the status panel."""
        self._log.append(text)
        self.changed()

    def advance(self, stage: str, done: int, total: int) -> None:
        """Remember how far the running job is."""
        self._progress = {"stage": stage, "done": done, "total": total}
        self.changed()

    @contextmanager
    def _exclusive(self, patience_s: float) -> Iterator[None]:
        if not self._job_lock.acquire(timeout=patience_s):
            raise RequestError("The workers are in the middle of a job; cancel it first, or wait for its end.")
        try:
            yield
        finally:
            self._job_lock.release()

    def _ready(self, model: Model, events: Events) -> Pool:
        if self._pool is not None and self._model == model and self._pool.alive:
            return self._pool
        self.stop()
        self._model = model
        self._set("starting")
        events.log(f"Starting {len(model.plan.ranks)} worker(s) for {model.name}.")
        try:
            self.before_start(model)
            pool = self._make_pool(model)
            try:
                self._pool = pool.open(poll=events.check)
            finally:
                if self._pool is None:  # the start failed or was cancelled
                    pool.close()
        finally:
            self._set("ready" if self._pool is not None else "stopped")
        self._unused = True
        return self._pool

    def _set(self, state: str, stage: str | None = None) -> None:
        self._state = state
        self._progress = {"stage": stage, "done": 0, "total": 0} if stage else None
        self.changed()

    def _await_idle(self) -> None:
        self._cancel_idle()
        if self.idle_minutes > 0 and self.alive:
            self._idle_timer = threading.Timer(self.idle_minutes * 60, self._stop_if_idle, (self.runs,))
            self._idle_timer.daemon = True
            self._idle_timer.start()

    def _cancel_idle(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _stop_if_idle(self, runs: int) -> None:
        if self._job_lock.acquire(blocking=False):
            try:
                if runs == self.runs and self.stop():
                    logger.info("The workers were idle for %g minutes and have been stopped.", self.idle_minutes)
            finally:
                self._job_lock.release()


class _Watched:
    """Passes a job's events on, and keeps what the status panel needs."""

    def __init__(self, events: Events, manager: PoolManager) -> None:
        self._events, self._manager = events, manager
        self._last, self._stage = 0.0, ""

    def progress(self, stage: str, done: int, total: int, latent: Tensor | None = None) -> None:
        now = time.monotonic()
        if stage != self._stage or done >= total or now - self._last > 0.5:
            self._last, self._stage = now, stage
            self._manager.advance(stage, done, total)
        self._events.progress(stage, done, total, latent)

    def log(self, text: str) -> None:
        self._manager.note(text)
        self._events.log(text)

    def check(self) -> None:
        self._events.check()


manager = PoolManager()
