"""Workers that torchrun started: two launch agents on this machine stand for two hosts."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.distributed.pool import (
    JobCancelledError,
    LogLine,
    Memory,
    Pool,
    PoolError,
    PoolSpec,
    Progress,
    RankError,
)
from magi2_native.distributed.remote import ask
from magi2_native.headless.cli import main
from magi2_native.headless.session import PoolSession
from magi2_native.magi2_core.codecs.media import read_back
from magi2_native.magi2_core.errors import RequestError
from magi2_native.magi2_core.events import SILENT
from magi2_native.magi2_core.memory.plan import make_plan
from magi2_native.magi2_core.sampling.geometry import TIERS, Tier
from magi2_native.stages.session import PLACE, launched_places
from magi2_native.tests.miniatures import Encoded, Listener, difference, tiny_engine

ENGINE = "magi2_native.tests.pool_engines:make_engine"
TWO = ParallelLayout(sp=2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[subprocess.Popen[bytes]]]]:
    """One agent for each of two hosts, one rank on each; the path of rank 0's socket, and the agents."""
    folder = tmp_path_factory.mktemp("launch")
    address, port = folder / "magi2.sock", free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [
        subprocess.Popen(
            [
                sys.executable, "-P", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test",
                "--local-addr", "127.0.0.1", "--max-restarts", "20",
                "-m", "magi2_native.distributed.hosts", "--socket", str(address),
            ],
            env=environment, stdout=(folder / f"{host}.log").open("wb"), stderr=subprocess.STDOUT,
        )
        for host in range(2)
    ]  # fmt: skip
    yield address, agents
    for agent in agents:
        agent.kill()
        agent.wait()


def connect(launch: tuple[Path, object]) -> Pool:
    return Pool(PoolSpec(ENGINE, {}, TWO, sockets=(str(launch[0]),), preview_seconds=0, grace_seconds=2)).open()


@pytest.fixture
def pool(launch: tuple[Path, object]) -> Iterator[Pool]:
    """A new client of the same workers."""
    with connect(launch) as pool:
        yield pool


def pids(pool: Pool) -> list[int]:
    return [rank["pid"] for replica in pool.status()["replicas"] for rank in replica["ranks"]]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def assert_right(pool: Pool) -> None:
    assert pool.submit("walk", {"steps": 3}).result() == {"total": 120}


def test_jobs_reach_all_ranks_and_come_back_through_the_first(pool: Pool) -> None:
    sent = {"x": torch.randn(300, 500), "empty": torch.empty(0, 3), "plain": (1, [None, b"b", b""], "\ud800")}
    back = pool.submit("echo", sent).result()
    assert torch.equal(back["x"], sent["x"])
    assert back["empty"].shape == (0, 3)
    assert back["plain"] == sent["plain"]
    assert pool.submit("where").result()["ranks"] == 2


def test_events_come_from_the_first_rank_and_memory_from_all(pool: Pool) -> None:
    events: list[object] = []
    pool.submit("walk", {"steps": 4, "latents": True}).result(on_event=events.append)
    ticks = [event for event in events if isinstance(event, Progress)]
    assert [tick.step for tick in ticks] == [1, 2, 3, 4]
    assert ticks[-1].latent is not None
    assert torch.equal(ticks[-1].latent, torch.full((4, 2, 8, 8), 4.0))
    assert {event.rank for event in events if isinstance(event, Memory)} == {0, 1}
    pool.submit("talk", {"lines": 1}).result(on_event=events.append)
    assert [event.text for event in events if isinstance(event, LogLine)] == ["line 0", "take care", "for the user"]


@pytest.mark.parametrize(
    ("call", "arguments", "stops"),
    [
        ("walk", {"steps": 100_000, "seconds": 0.02}, True),
        ("swallow", {}, True),
        ("alone", {"steps": 1000, "seconds": 0.02}, True),
        ("apart", {"rank": 0, "checks": 40, "seconds": 0.02}, False),
        ("apart", {"rank": 1, "checks": 40, "seconds": 0.02}, False),
    ],
)
def test_cancel_stops_all_hosts_at_one_point(pool: Pool, call: str, arguments: dict[str, object], stops: bool) -> None:
    workers = pids(pool)
    job = pool.submit(call, arguments)
    time.sleep(0.3)
    start = time.monotonic()
    job.cancel()
    if stops:
        with pytest.raises(JobCancelledError):
            job.result()
        assert time.monotonic() - start < 2
    else:  # one rank had passed its last check point, so the job ended in its own way
        assert job.result() == {"ranks": 2}
    assert_right(pool)
    assert pids(pool) == workers


def test_an_error_of_all_ranks_leaves_them_alive(pool: Pool) -> None:
    workers = pids(pool)
    with pytest.raises(RankError, match="an odd size") as caught:
        pool.submit("fail", {"text": "an odd size"}).result()
    assert caught.value.survived
    with pytest.raises(RankError, match=r"result\.value is a object"):
        pool.submit("unsendable").result()
    assert_right(pool)
    assert pids(pool) == workers


def test_a_client_that_is_killed_stops_its_job_and_the_workers_serve_the_next(launch: tuple[Path, object]) -> None:
    with connect(launch) as pool:
        workers = pids(pool)
    program = f"""
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.distributed.pool import Pool, PoolSpec, Progress
pool = Pool(PoolSpec({ENGINE!r}, {{}}, ParallelLayout(sp=2), sockets=({str(launch[0])!r},)))
job = pool.submit("walk", {{"steps": 100000, "seconds": 0.05}})
next(event for event in job.events() if isinstance(event, Progress))
print("walking", flush=True)
job.result()
"""
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "walking\n"
        client.kill()
    with connect(launch) as pool:
        assert_right(pool)
        assert pids(pool) == workers


def test_a_rank_that_raises_alone_is_named_and_torchrun_starts_all_anew(pool: Pool) -> None:
    workers = pids(pool)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 \(cpu on .*\) raised ValueError in 'fail': alone") as caught:
        pool.submit("fail", {"text": "alone", "rank": 1}).result()
    assert time.monotonic() - start < 10
    assert "in fail" in caught.value.traceback
    assert_right(pool)
    assert not set(pids(pool)) & set(workers)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (1, r"Rank 1 .* is gone \(its process or its host ended"),
        (0, r"Rank 0 .* is gone \(the connection at .* closed"),
    ],
)
def test_a_killed_rank_is_named(pool: Pool, rank: int, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        pool.submit("die", {"how": "SIGKILL", "rank": rank}).result()
    assert time.monotonic() - start < 10
    assert_right(pool)


def test_a_rank_that_does_not_stop_costs_a_new_start(pool: Pool) -> None:
    workers = pids(pool)
    job = pool.submit("hold", {"seconds": 600, "rank": 1})
    next(event for event in job.events() if isinstance(event, Progress))
    time.sleep(0.2)
    start = time.monotonic()
    job.cancel()
    with pytest.raises(JobCancelledError, match="did not stop within 2 s"):
        job.result()
    assert time.monotonic() - start < 8
    assert_right(pool)
    assert not set(pids(pool)) & set(workers)


def test_a_layout_that_the_launch_does_not_have_is_refused(launch: tuple[Path, object]) -> None:
    with (
        Pool(PoolSpec(ENGINE, {}, ParallelLayout(sp=4), sockets=(str(launch[0]),))) as other,
        pytest.raises(RankError, match=r"Layout sp4 has 4 ranks .* has 2 ranks"),
    ):
        other.open()
    with connect(launch) as pool:
        assert_right(pool)


def test_a_launch_takes_its_place_in_the_layout_from_each_client_anew(launch: tuple[Path, object]) -> None:
    layout, address = ParallelLayout(sp=2, dp=2), str(launch[0])
    for replica, sockets in enumerate([(address, "/none"), ("/none", address), (address, "/none")]):
        with Pool(PoolSpec(ENGINE, {}, layout, sockets=sockets)) as pool:
            seen = pool.submit("where", replica=replica % 2).result()
        assert (seen["rank"], seen["layout"], seen["ranks"]) == (2 * (replica % 2), "dp2sp2", 2)


# ---- the model on several hosts


def test_the_command_makes_a_clip_with_the_workers_of_a_launch(
    launch: tuple[Path, object], tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(TIERS, "272p", Tier((64, 32)))
    file = tmp_path / "clip.mp4"
    request = ["--prompt", "A boat", "--output", str(file), "--resolution", "272p", "--steps", "1"]
    assert main(["generate", str(tiny), *request, "--launch", str(launch[0])]) == 0
    said = capsys.readouterr().err
    assert "layout sp2" in said
    assert f"rank 1 on cpu of {socket.gethostname()}: " in said
    assert (read_back(file).frames, read_back(file).samples) == (125, 441_000)


def test_hosts_sample_what_one_process_samples(launch: tuple[Path, object], tiny: Path, encoded: Encoded) -> None:
    plan = make_plan(tiny, places=launched_places(str(launch[0])), dtype="float32")
    with PoolSession(plan, str(launch[0])) as session:
        shared = session.run("sample", encoded.sample(), SILENT)
    alone = tiny_engine(tiny).run("sample", encoded.sample(), SILENT)
    assert difference(shared["video"], alone["video"]) <= 1e-5


def test_a_cancel_in_decoding_stops_all_hosts_and_keeps_their_workers(
    launch: tuple[Path, list[subprocess.Popen[bytes]]], tiny: Path, tmp_path: Path
) -> None:
    plan = make_plan(tiny, places=launched_places(str(launch[0])))
    video = torch.randn(48, 90, 4, 8, generator=torch.Generator().manual_seed(1))
    clip = {"video": video, "waveform": None, "sample_rate": 44_100, "crf": 10, "fps": "25/2"}
    with PoolSession(plan, str(launch[0])) as session:
        session.run("load", {"stages": ["video_decoder"]}, SILENT)
        workers = pids(session._pool)
        assert {psutil.Process(pid).ppid() for pid in workers} == {agent.pid for agent in launch[1]}
        listener = Listener(interrupt=InterruptedError(), at_stage="decode_video")
        with pytest.raises(InterruptedError):
            session.run("write_clip", {**clip, "path": str(tmp_path / "clip.mp4")}, listener)
        assert not list(tmp_path.iterdir())
        with pytest.raises(RequestError, match="gone does not exist"):
            session.run("write_clip", {**clip, "path": str(tmp_path / "gone" / "clip.mp4")}, SILENT)
        assert len(session.run("decode_video", {"video": video[:, :2]}, SILENT)["frames"]) == 5
        assert pids(session._pool) == workers


def test_what_a_launch_cannot_answer_is_a_sentence(launch: tuple[Path, object], tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"Rank 0 on .* cannot answer: .*no_such_function"):
        ask(str(launch[0]), "magi2_native.tests.pool_engines:no_such_function")
    with pytest.raises(PoolError, match=r"No workers answer at .*none; start them with torchrun"):
        ask(str(tmp_path / "none"), PLACE, seconds=0.1)
    with connect(launch) as pool:
        assert_right(pool)


def test_only_the_user_can_open_the_socket(launch: tuple[Path, object], pool: Pool) -> None:
    mode = launch[0].stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_launch_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with (
        Pool(PoolSpec(ENGINE, {}, TWO, sockets=(str(tmp_path / "none"),), start_seconds=0.5)) as pool,
        pytest.raises(PoolError, match=r"No workers answer at .*none; start them with torchrun"),
    ):
        pool.open()
    with pytest.raises(PoolError, match="give one socket for each replica, and no devices"):
        PoolSpec(ENGINE, {}, TWO, ("cpu", "cpu"), sockets=("a",))


def test_no_worker_outlives_its_killed_launch(pool: Pool, launch: tuple[Path, list[subprocess.Popen[bytes]]]) -> None:
    """The last test of this launch."""
    workers = pids(pool)
    assert all(running(pid) for pid in workers)
    for agent in launch[1]:
        agent.send_signal(signal.SIGKILL)
    assert within(5, lambda: not any(running(pid) for pid in workers))
