"""One rank of a replica, as the client knows it from what the rank says."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from .job import Memory


@dataclass
class Rank:
    number: int
    device: str
    pid: int = 0
    device_name: str = ""
    memory: Memory | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    ready: bool = False
    end: dict[str, Any] | None = None  # how it ended the current job, see worker.run_call
    death: str = ""  # how it died, as the predicate of a sentence
    failed_at: float = 0.0

    @property
    def name(self) -> str:
        return f"Rank {self.number} ({self.device}, pid {self.pid})"

    @property
    def raised(self) -> dict[str, Any] | None:
        """The error that the engine raised in this rank, as it was sent."""
        return self.end["error"] if self.end is not None and self.end["outcome"] == "failed" else None

    @property
    def failed(self) -> bool:
        return bool(self.death) or self.raised is not None

    def crash_report(self) -> str:
        """What the process wrote when it crashed, if that can be had."""
        return ""

    def stack_report(self) -> str:
        """Where the process stands now, if that can be had."""
        return ""

    def status(self) -> dict[str, Any]:
        """Plain values for a status panel; may be called from any thread."""
        return {
            "rank": self.number,
            "pid": self.pid,
            "device": self.device,
            "device_name": self.device_name,
            "memory": None if self.memory is None else asdict(self.memory),
            "log": list(self.lines)[-10:],
        }
