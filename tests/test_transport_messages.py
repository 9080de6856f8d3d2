"""Messages between processes: every value comes back as it was, tensors cross once, and nothing is left behind."""

import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from magi2_native.distributed.transport import INLINE_BYTES, Channel, Packed
from magi2_native.distributed.tree import TransportError

LARGE = INLINE_BYTES + 1


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    first, second = socket.socketpair()
    yield Channel(first), Channel(second)
    first.close()
    second.close()


def crossed(ends: tuple[Channel, Channel], value: Any) -> Any:
    ends[0].send(value)
    return ends[1].receive()


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**64 - 1, 10**40, 0.1, -0.0, 1e308, math.inf, "", "\ud800 \0 شكرا 🎬", b"", b"\0\xff", [],
        (), {}, {"a": [1, (2, [3.5, None])], "b": {"c": (b"d", {"e": False})}}, {1: "int key", None: 2, (3, 4): b"x"},
        {"$tensor": [1]}, {"$dict": {"$tuple": 1}}, {"text": "long " * 40_000}, b"x" * 300_000,
    ],
)  # fmt: skip
def test_plain_values_come_back_equal_and_of_the_same_type(ends: tuple[Channel, Channel], value: Any) -> None:
    back = crossed(ends, value)
    assert back == value
    assert repr(back) == repr(value)


def test_nan_comes_back(ends: tuple[Channel, Channel]) -> None:
    assert math.isnan(crossed(ends, {"x": math.nan})["x"])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 5), (300, 401)])
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64]
)
def test_tensors_of_every_size_and_dtype_come_back_exactly(
    ends: tuple[Channel, Channel], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = torch.randn(shape).mul(100).to(dtype)
    back = crossed(ends, ["a", sent, {"also": sent.clone()}])
    for tensor in (back[1], back[2]["also"]):
        assert tensor.dtype == dtype
        assert tensor.shape == sent.shape
        assert torch.equal(tensor, sent)


def test_strided_inference_and_grad_tensors_cross(ends: tuple[Channel, Channel]) -> None:
    base = torch.arange(600 * 500.0).view(600, 500)
    with torch.inference_mode():
        inference = base + 1
    back = crossed(ends, (base.t(), base[::2, ::3], inference, base.clone().requires_grad_()))
    for got, sent in zip(back, (base.t(), base[::2, ::3], inference, base), strict=True):
        assert torch.equal(got, sent)
        assert got.is_contiguous()
        assert not got.requires_grad
        assert not got.is_inference()
        got += 1  # the receiver may write


def test_a_view_takes_its_own_bytes_along_and_not_its_storage() -> None:
    packed = Packed(torch.zeros(100, LARGE, dtype=torch.uint8)[3])
    assert [os.fstat(file).st_size for file in packed.files] == [LARGE]
    packed.close()


def test_receivers_of_one_message_do_not_see_each_others_writes() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    sent = torch.zeros(LARGE)
    packed = Packed({"x": sent})
    for ours, _ in pairs:
        Channel(ours).send(packed)
    packed.close()
    first, second = (Channel(theirs, private=True).receive()["x"] for _, theirs in pairs)
    first.fill_(1)
    assert second.sum() == 0
    assert sent.sum() == 0


@pytest.mark.parametrize(
    ("value", "where"),
    [({"a": [1, object()]}, r"a\[1\] is a object"), ({"b": {1, 2}}, "b is a set"), (len, "message is a builtin"),
     ({"c": torch.ones(2, 2).to_sparse()}, "c is a torch.sparse_coo tensor"),
     ({"d": torch.empty(2, device="meta")}, "d is a .* on meta"), ({"e": torch.float32}, "e is a dtype")],
)  # fmt: skip
def test_a_value_that_cannot_cross_is_named_with_its_place(value: Any, where: str) -> None:
    with pytest.raises(TransportError, match=where):
        Packed(value)


def test_a_message_of_any_size_is_sent_without_a_reader(ends: tuple[Channel, Channel]) -> None:
    """A blocked sender and a blocked receiver would wait for each other."""
    many = [torch.full((1000,), i) for i in range(500)]
    value = {"text": "x" * 5_000_000, "many": many, "big": torch.ones(2_000_000)}
    ends[0].send(value)
    back = ends[1].receive()
    assert back["text"] == value["text"]
    assert all(torch.equal(a, b) for a, b in zip(back["many"], value["many"], strict=True))
    assert torch.equal(back["big"], value["big"])


def test_more_large_tensors_than_descriptors_fit_is_a_sentence() -> None:
    with pytest.raises(TransportError, match="at most 250"):
        Packed([torch.empty(LARGE, dtype=torch.uint8)] * 251)


def test_messages_keep_their_order_and_borders(ends: tuple[Channel, Channel]) -> None:
    for i in range(20):
        ends[0].send({"i": i, "large": torch.full((LARGE,), i)})
    for i in range(20):
        message = ends[1].receive()
        assert message["i"] == i
        assert message["large"].unique().tolist() == [i]


def test_the_end_of_the_other_side_is_an_eof(ends: tuple[Channel, Channel]) -> None:
    ends[0].send("last")
    ends[0].close()
    assert ends[1].receive() == "last"
    with pytest.raises(EOFError):
        ends[1].receive()


def test_the_end_in_the_middle_of_a_message_is_an_eof() -> None:
    first, second = socket.socketpair()
    packed = Packed({"a": "b" * 100})
    first.sendall((packed.head + packed.body)[:50])
    first.close()
    with pytest.raises(EOFError):
        Channel(second).receive()


def test_nothing_received_is_unpickled(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pickle was used")

    for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert crossed(ends, {"x": torch.ones(LARGE), "y": b"z"})["y"] == b"z"


def _send_and_die(connection: socket.socket) -> None:
    Channel(connection).send({"frames": torch.full((50, 64, 64, 3), 7, dtype=torch.uint8)})
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_message_outlives_its_killed_sender() -> None:
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=_send_and_die, args=(theirs,))
    process.start()
    theirs.close()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert Channel(ours).receive()["frames"].unique().tolist() == [7]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc and /dev/shm")
def test_no_descriptor_and_no_shared_memory_is_left_or_even_used(ends: tuple[Channel, Channel]) -> None:
    def shared_memory() -> tuple[list[str], int]:
        return sorted(os.listdir("/dev/shm")), os.statvfs("/dev/shm").f_bfree

    before, names = _descriptors(), shared_memory()[0]
    for _ in range(50):
        ends[0].send({"x": torch.ones(LARGE), "y": torch.ones(LARGE)})
        free = shared_memory()[1]
        received = ends[1].receive()
        assert shared_memory()[0] == names
        assert _descriptors() <= before + 2
    del received
    gc.collect()
    assert _descriptors() == before
    # 200 MB under way take no page of /dev/shm; other processes may use a little of it meanwhile.
    ends[0].send(torch.ones(50_000_000))
    assert free - shared_memory()[1] < 10_000_000 / os.statvfs("/dev/shm").f_frsize
    ends[1].receive()


def test_without_memfd_an_unlinked_file_serves(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbidden, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sent = torch.randn(LARGE)
    ends[0].send({"x": sent})
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(ends[1].receive()["x"], sent)


def test_a_full_device_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(TransportError, match=r"No space left on device\. Free memory"):
        Packed(torch.ones(LARGE))


def test_frames_cross_where_shared_memory_is_64_megabytes() -> None:
    """The default of a container, made with a mount of its own; needs the right to mount."""
    program = """
import os, socket, torch
from magi2_native.distributed.transport import Channel
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
first, second = map(Channel, socket.socketpair())
frames = torch.full((100, 544, 960, 3), 5, dtype=torch.uint8)
first.send({"frames": frames})
assert torch.equal(second.receive()["frames"], frames)
print("crossed", frames.nbytes)
"""
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm && exec \"$0\" -P -c \"$1\""
    run = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, program], capture_output=True, text=True, check=False
    )
    if "crossed" not in run.stdout and "Operation not permitted" in run.stderr:
        pytest.skip("this account may not mount; that /dev/shm is not used at all is tested above")
    assert run.stdout == "crossed 156672000\n", run.stderr
