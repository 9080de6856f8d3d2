"""A replica that torchrun started, on one host or several; the client reaches it through its rank 0 (hosts.py)."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict
from typing import Any

from .job import PoolError
from .rank import Rank
from .replica import Replica
from .spec import PoolSpec
from .transport import Channel, Packed
from .tree import TransportError

_RETRY_SECONDS = 0.25
_CHANNEL_SECONDS = 10.0


def ask(address: str, function: str, seconds: float = 30.0) -> list[dict[str, Any]]:
    """What `function` ("package.module:callable", called with the rank's device) finds on each rank of a launch, a dict
    of plain values, with its `host` added; in rank order. PoolError if no workers answer, or one cannot."""
    address, deadline = os.path.expanduser(address), time.monotonic() + seconds
    while True:
        channel = _reach(address)
        if channel is not None:
            with contextlib.suppress(EOFError, OSError, TransportError), contextlib.closing(channel):
                channel.send({"kind": "ask", "function": function})
                return _answers(channel)
        if time.monotonic() > deadline:
            raise PoolError(_nobody(address))
        time.sleep(_RETRY_SECONDS)


def _answers(channel: Channel) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = []
    while not answers or len(answers) < answers[0]["ranks"]:
        if (message := channel.receive())["kind"] == "answer":
            answers.append(message)
    for answer in answers:
        if answer["error"]:
            raise PoolError(f"Rank {answer['rank']} on {answer['host']} cannot answer: {answer['error']['message']}")
    return [{**answer["found"], "host": answer["host"]} for answer in sorted(answers, key=lambda each: each["rank"])]


def _reach(address: str) -> Channel | None:
    """A connection to rank 0 of the launch that listens there, if one does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_CHANNEL_SECONDS)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return Channel(connection)


def _nobody(address: str, lost: int = 0) -> str:
    gone = f" ({lost} connections to them were lost, see the output of torchrun)" if lost else ""
    return (
        f"No workers answer at {address}{gone}; start them with torchrun on every host, see docs/multi-node.md. They "
        "serve one client at a time."
    )


class RemoteReplica(Replica):
    def __init__(self, spec: PoolSpec, index: int) -> None:
        super().__init__(spec, index)
        self._address = os.path.expanduser(spec.sockets[index])
        self._channel: Channel | None = None
        self._try_at, self._lost = 0.0, 0

    def start(self) -> None:
        super().start()
        first = self.index * self.size
        self.ranks = [Rank(first + number, "not reached") for number in range(self.size)]
        self._try_at, self._lost = 0.0, 0

    def advance(self) -> None:
        if self.state == "starting" and self._channel is None:
            self._connect(time.monotonic())
        else:
            super().advance()

    def _connect(self, now: float) -> None:
        """Try to reach rank 0, which may still be starting, or starting anew after a fault."""
        if now > self._deadline:
            self.kill()
            self.start_error = PoolError(_nobody(self._address, self._lost))
        if now < self._try_at or self.state == "down":
            return
        self._try_at = now + _RETRY_SECONDS
        self._channel = _reach(self._address)
        if self._channel is None:
            return
        self._send({
            "kind": "hello", "engine": self._spec.engine, "plan": dict(self._spec.plan),
            "first": self.index * self.size, "layout": asdict(self._spec.layout),
            "preview_seconds": self._spec.preview_seconds, "grace_seconds": self._spec.grace_seconds,
        })  # fmt: skip

    def files(self) -> list[Any]:
        return [] if self._channel is None or any(rank.death for rank in self.ranks) else [self._channel]

    def receive(self, ready: list[Any]) -> None:
        channel = self._channel
        if channel is None or channel not in ready:
            return
        try:
            while channel.ready():
                message = channel.receive()
                if message.get("error"):
                    message["error"]["time"] = time.monotonic()  # another host's clock says nothing here
                self._take_from(self.ranks[message.pop("rank")], message)
        except (EOFError, OSError, TransportError):
            self._lose()

    def _take_from(self, rank: Rank, message: dict[str, Any]) -> None:
        if message["kind"] == "death" and self.state == "starting":
            raise EOFError("This launch is about to be replaced.")
        if message["kind"] == "death":
            rank.death = message["how"]
            self._note_failure(rank, time.monotonic(), 0.0)
        elif message["kind"] == "ready":
            self._take(rank, {**message, "device": f"{message['device']} on {message['host']}"})
        else:
            self._take(rank, message)

    def _lose(self) -> None:
        """Rank 0 is gone. What it has told before is the cause; if it told nothing, this is.

        In a start it may be an old one that is about to be replaced, so the next is tried until the deadline.
        """
        known = any(rank.failed for rank in self.ranks)
        if self.state == "starting" and not known:
            self._hang_up()
            self._lost += 1
            return
        for rank in self.ranks[: 1 if not known else 0]:
            rank.death = f"is gone (the connection at {self._address} closed; see the output of torchrun)"
            self._note_failure(rank, time.monotonic(), 0.0)
        if known:
            self._settled_at = min(self._settled_at, time.monotonic())

    def _hand_out(self, message: Packed) -> None:
        self._send(message)

    def _ask_to_stop(self, job: int) -> None:
        self._send({"kind": "cancel", "job": job})

    def _send(self, message: Any) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):  # its end is noticed when it is read
                self._channel.send(message)

    def ask_to_quit(self) -> None:
        """The workers belong to their launch: they drop what they hold, and wait for the next client."""

    def quit(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._hang_up()
        self.ranks = []
        self.state = "down"

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
