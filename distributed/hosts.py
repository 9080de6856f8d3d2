"""Workers on several hosts, started by torchrun, for a client on the first of them.

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST:29400 --max-restarts 100 \\
        -m magi2_native.distributed.hosts --socket ~/magi2.sock

Torchrun starts the ranks, joins them and, when one is lost, starts all of them anew. Rank 0 listens on a Unix-domain
socket that only its user can open; a pool with `PoolSpec.sockets` connects to it (remote.py). Jobs travel from rank 0
to the others over gloo as JSON and tensors, nothing is pickled; results, progress and errors go back through rank 0.

When a rank fails, the others may wait for it in a collective forever. So rank 0 hears of it at once (mail.py), tells
the client, and ends unless all ranks end the job at the same point; torchrun then ends the others.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import queue
import socket
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import orphan
from .agreement import StopByMessage
from .exchange import ParallelContext
from .layout import ParallelLayout
from .mail import Mail, Message
from .transport import Channel
from .worker import (
    NO_LIMIT,
    Engine,
    LineForwarder,
    RankEvents,
    describe_error,
    find,
    give_back_free_memory,
    introduce,
    make_engine,
    measure_memory,
    run_call,
    send_end,
)

# How long the other ranks may take to end after one raised or was lost, and a job after its client has left.
RAISED_SECONDS, LOST_SECONDS, LEFT_SECONDS = 2.0, 0.2, 10.0
_NOTHING = -1
logger = logging.getLogger("magi2")


class HostRank:
    """One rank of the launch: does what rank 0 is told by its client, message by message."""

    def __init__(self, device: torch.device) -> None:
        self.mail = Mail()
        self.device = device
        self.stop = StopByMessage()
        self._result: dict[str, Any] | None = None
        self._engine: Engine | None = None
        self._hello: Message = {}
        self._groups: dict[ParallelLayout, ParallelContext] = {}  # of one replica; they serve every client

    def act(self, message: Message) -> list[Message]:
        """Carry out one message, the same on every rank; returns what every rank has to say of it."""
        if message["kind"] == "run":
            answer = self._run(message)
        elif message["kind"] == "hello":
            answer = self._begin(message)
        elif message["kind"] == "ask":
            answer = self._answer(message)
        else:
            answer = self._leave()
        give_back_free_memory()
        return self.mail.gather({**answer, "rank": self.mail.rank, "memory": measure_memory(self.device)})

    def _begin(self, hello: Message) -> Message:
        """Make the engine that a client asks for."""
        self._engine, self._hello = None, hello
        try:
            layout = ParallelLayout(**hello["layout"])
            own = replace(layout, dp=1)
            if own not in self._groups:
                self._groups[own] = ParallelContext.create(own, self.mail.rank, self.device)
            parallel = replace(self._groups[own], layout=layout, rank=hello["first"] + self.mail.rank)
            self._engine = make_engine(hello["engine"], hello["plan"], parallel)
        except BaseException as error:
            end = {"kind": "end", "job": 0, "outcome": "failed", "error": describe_error(error)}
            self._tell_at_once({**end, "serial": 0})
            return end
        return {"kind": "ready", **introduce(self.device), "host": socket.gethostname()}

    def _answer(self, question: Message) -> Message:
        """What a client wants to know of every rank before it has an engine made, see remote.ask."""
        known = {"kind": "answer", "ranks": self.mail.ranks, "host": socket.gethostname(), "error": None}
        try:
            return {**known, "found": find(question["function"])(self.device)}
        except Exception as error:
            return {**known, "error": describe_error(error)}

    def _run(self, message: Message) -> Message:
        assert self._engine is not None
        serial = message["serial"]
        events = RankEvents(
            message["job"], self.say, lambda: self.stop.passes(serial), speaks=self.mail.rank == 0, device=self.device,
            preview_seconds=self._hello["preview_seconds"],
        )  # fmt: skip
        end = run_call(self._engine, message, events, self.device)
        self._result, end["result"] = end["result"], None
        if end["outcome"] == "failed":
            self._tell_at_once({**end, "serial": serial})
        return end

    def _leave(self) -> Message:
        """The client left; what its engine held goes with it."""
        self._engine = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return {}

    def say(self, message: Message) -> None:
        """To the client; other ranks than 0 have no way to it while a job runs."""

    def _tell_at_once(self, end: Message) -> None:
        self.mail.tell(0, {**end, "rank": self.mail.rank})

    def follow(self) -> None:
        """On other ranks than 0: do what rank 0 says, for ever."""
        threading.Thread(target=self._hear, name="magi2-first", daemon=True).start()
        while True:
            self.act(self.mail.share(None))

    def _hear(self) -> None:
        """In a thread: answer rank 0 about stops, and end when it is gone."""
        while True:
            try:
                message = self.mail.hear(0)
            except RuntimeError:
                os._exit(1)
            serial = message["serial"]
            if message["kind"] == "hold":
                passed = self.stop.hold(serial)
                self.mail.tell(0, {"kind": "held", "serial": serial, "passed": passed})
            else:
                self.stop.stop_at(serial, message["at"])


class FirstRank(HostRank):
    """Rank 0: also speaks with the client, and with the others about stops and failures."""

    def __init__(self, device: torch.device, address: Path) -> None:
        super().__init__(device)
        self._listener = listen_privately(address)
        self._channel: Channel | None = None
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._serials = 0  # jobs of all clients, whose own numbers repeat
        self._now = _NOTHING  # the serial of the job that runs, 0 for a start
        self._job = 0  # its number for the client
        self._held: dict[int, int] = {}
        self._told: list[Message] = []
        self._timer: threading.Timer | None = None
        self._ends_at = 0.0
        for rank in range(1, self.mail.ranks):
            threading.Thread(target=self._hear_rank, args=(rank,), name=f"magi2-rank{rank}", daemon=True).start()

    def serve(self) -> None:
        """Serve one client after the other, for ever."""
        while True:
            connection, _ = self._listener.accept()
            self._channel = channel = Channel(connection)
            threading.Thread(target=self._read_client, args=(channel,), name="magi2-client", daemon=True).start()
            try:
                while (message := self._messages.get())["kind"] != "left":
                    self._carry_out(message)
                self.act(self.mail.share({"kind": "left"}))
            except RuntimeError:  # communication broke: who broke it is about to be known
                with self._lock:
                    self._end_in(LOST_SECONDS)
                threading.Event().wait()
            channel.close()

    def _carry_out(self, message: Message) -> None:
        with self._lock:
            self._held, self._told, self._job, self._now = {}, [], message.get("job", 0), 0
            if message["kind"] == "run":
                self._serials += 1
                self._now = self._serials
        answers = self.act(self.mail.share({**message, "serial": self._now}))
        with self._lock:
            self._now = _NOTHING
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for answer in answers:
            self.say({"kind": "memory", "rank": answer["rank"], "memory": answer.pop("memory")})
            if answer["kind"] == "end" and answer["rank"] == 0:
                answer["result"], self._result = self._result, None
                send_end(self.say, answer)
            else:
                self.say(answer)
        if not all(answer.get("usable", True) for answer in answers):
            os._exit(1)  # a device no longer computes: only a new process helps

    def say(self, message: Message) -> None:
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):  # the client left; its reader knows
                channel.send({"rank": 0, **message})

    def _tell_at_once(self, end: Message) -> None:
        self._fail({**end, "rank": 0}, RAISED_SECONDS)

    # ---- threads

    def _read_client(self, channel: Channel) -> None:
        while True:
            try:
                message = channel.receive()
            except (EOFError, OSError):
                break
            if message["kind"] != "cancel":
                self._messages.put(message)
            elif message["job"] == self._job:
                self._agree_to_stop()
        with self._lock:
            if self._now != _NOTHING:
                self._end_in(LEFT_SECONDS)
        self._agree_to_stop()
        self._messages.put({"kind": "left"})

    def _agree_to_stop(self) -> None:
        """Ask every rank how many check points it has passed; it passes no other until all have answered."""
        with self._lock:
            if self._now <= 0 or self._held:
                return
            # A rank that hangs may not even take the question; the client gives up one second earlier.
            self._end_in(self._hello["grace_seconds"] + 1)
            self._held = {0: self.stop.hold(self._now)}
            for rank in range(1, self.mail.ranks):
                self._tell(rank, {"kind": "hold", "serial": self._now})
            self._conclude_stop()

    def _conclude_stop(self) -> None:
        """When every rank has answered, tell all where to stop."""
        if len(self._held) == self.mail.ranks:
            at = 1 + max(self._held.values())
            for rank in range(1, self.mail.ranks):
                self._tell(rank, {"kind": "stop", "serial": self._now, "at": at})
            self.stop.stop_at(self._now, at)

    def _tell(self, rank: int, message: Message) -> None:
        with contextlib.suppress(RuntimeError):  # it is gone; the thread that hears it knows
            self.mail.tell(rank, message)

    def _hear_rank(self, rank: int) -> None:
        """What another rank says, until it is gone."""
        while True:
            try:
                message = self.mail.hear(rank)
            except RuntimeError:
                how = "is gone (its process or its host ended; see the output of torchrun there)"
                self._fail({"kind": "death", "rank": rank, "how": how}, LOST_SECONDS)
                return
            with self._lock:
                if message.pop("serial") != self._now:
                    continue
                if message["kind"] == "held":
                    self._held[rank] = message["passed"]
                    self._conclude_stop()
                else:
                    self._fail(message, RAISED_SECONDS)

    def _fail(self, message: Message, patience: float) -> None:
        """A rank failed: unless all ranks end the job by then, tell the client and end."""
        with self._lock:
            message.pop("serial", None)
            self._told.append(message)
            self._end_in(patience)
            self._agree_to_stop()

    def _end_in(self, seconds: float) -> None:
        """End the launch then, or earlier if that is settled already, unless the job ends before."""
        end = time.monotonic() + seconds
        if self._timer is not None:
            if self._ends_at <= end:
                return
            self._timer.cancel()
        self._ends_at = end
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        for message in self._told:
            self.say(message)
        os._exit(1)


def listen_privately(address: Path) -> socket.socket:
    """A listening Unix-domain socket that only this user can open; a stale one of an earlier launch gives way."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(address.stat().st_mode):
            raise SystemExit(f"{address} exists and is not a socket; give another path.")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(address))
            except ConnectionRefusedError:
                address.unlink()
            else:
                raise SystemExit(f"Another launch listens on {address}; give another path.")
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    try:
        listener.bind(str(address))
    except OSError as error:
        raise SystemExit(f"No socket can be made at {address}: {error.strerror}.") from error
    finally:
        os.umask(mask)
    listener.listen(1)
    return listener


def main(arguments: list[str] | None = None) -> None:
    """Be one rank of a launch; never returns."""
    parser = argparse.ArgumentParser(description="One rank of workers on several hosts; started by torchrun.")
    parser.add_argument("--socket", type=Path, required=True, help="where rank 0 listens for its client")
    address = parser.parse_args(arguments).socket.expanduser()
    if "RANK" not in os.environ:
        parser.error("start this with torchrun, on every host.")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS") != "0":
        # Each agent counts restarts in its own way, and names the place where ranks meet by that count.
        parser.error("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host: without it, ranks that torchrun restarts "
                     "do not find each other.")  # fmt: skip
    orphan.die_with_parent(os.getppid())
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=NO_LIMIT)
    logging.getLogger("magi2").setLevel(logging.INFO)
    if dist.get_rank() == 0:
        first = FirstRank(device, address)
        logging.getLogger().addHandler(LineForwarder(first.say))
        first.serve()
    try:
        logging.basicConfig(format=f"magi2 rank {dist.get_rank()}: %(levelname)s %(message)s")
        HostRank(device).follow()
    except RuntimeError as error:  # rank 0 is gone, and with it the communication
        logger.warning("ends: %s", error)
        os._exit(1)


if __name__ == "__main__":
    main()
