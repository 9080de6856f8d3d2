"""Whatever ends the parent and whatever its workers do, five seconds later none is alive (80 §5, 60 §6.5)."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the workers through /proc")

# Pools in the named states: idle, in mid-step, or with a rank stuck in C code that holds the interpreter's lock.
DRIVER = """
import ctypes, os, sys, time
from magi2_native.distributed.layout import ParallelLayout
from magi2_native.distributed.pool import Pool, PoolSpec, Progress

ENGINE = "magi2_native.tests.pool_engines:make_engine"
jobs = {
    "idle": (1, "echo", {}),
    "mid-step": (2, "walk", {"steps": 100000, "seconds": 0.05}),
    "stuck": (2, "hold", {"seconds": 600, "rank": 1}),
}
running = {}
for state in sys.argv[1:]:
    ranks, call, arguments = jobs[state]
    pool = Pool(PoolSpec(ENGINE, {}, ParallelLayout(sp=ranks)))
    running[state] = pool, pool.submit(call, arguments)
for state, (pool, job) in running.items():
    if state == "idle":
        job.result()
    else:
        next(event for event in job.events() if isinstance(event, Progress))
    print(state, *(rank["pid"] for rank in pool.status()["replicas"][0]["ranks"]), sep=",")
print("ready", flush=True)
how = sys.stdin.readline().strip()
if how == "execv":
    os.execv(sys.executable, [sys.executable, "-c", "print('executed', flush=True); import time; time.sleep(60)"])
if how == "segfault":
    ctypes.string_at(0)
if how == "exit":
    sys.exit(3)
if how == "exception":
    raise RuntimeError("elsewhere")
time.sleep(60)
"""


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent to ask does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def marked(mark: str) -> list[int]:
    """The running processes that inherited `mark` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment and alive(int(folder.name)):
            found.append(int(folder.name))
    return found


@pytest.fixture
def mark() -> Iterator[str]:
    name = f"MAGI2_TEST_{uuid.uuid4().hex}"
    yield name
    for pid in marked(name):  # only what this test left behind, if it failed
        os.kill(pid, signal.SIGKILL)


def start(program: str, mark: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, mark: "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


STATES = ("idle", "mid-step", "stuck")


@pytest.mark.parametrize(
    ("how", "states"),
    [
        *((how, STATES) for how in ("SIGINT", "SIGTERM", "SIGKILL", "execv", "segfault")),
        ("exit", ("mid-step",)),
        ("exception", ("mid-step",)),
    ],
)
def test_no_worker_and_no_file_outlives_the_parent(how: str, states: tuple[str, ...], mark: str) -> None:
    shared = sorted(os.listdir("/dev/shm"))
    with start(DRIVER, mark, *states) as driver:
        assert driver.stdout is not None
        assert driver.stdin is not None
        workers = {}
        for line in driver.stdout:
            if line == "ready\n":
                break
            name, *pids = line.strip().split(",")
            workers[name] = [int(pid) for pid in pids]
        assert tuple(workers) == states
        assert {driver.pid, *itertools.chain(*workers.values())} < set(marked(mark))
        assert all(alive(pid) for pids in workers.values() for pid in pids)
        if how.startswith("SIG"):
            driver.send_signal(getattr(signal, how))
        else:
            driver.stdin.write(f"{how}\n")
            driver.stdin.flush()
        if how == "execv":
            assert driver.stdout.readline() == "executed\n"
            ended = time.monotonic()
            expected = [driver.pid]
        else:
            driver.wait(20)
            ended = time.monotonic()
            expected = []
        while marked(mark) != expected and time.monotonic() < ended + 5:
            time.sleep(0.05)
        left = {name: [pid for pid in pids if alive(pid)] for name, pids in workers.items()}
        assert left == {state: [] for state in states}
        assert marked(mark) == expected, "something else is left, such as multiprocessing's resource tracker"
        driver.kill()
    assert [name for name in os.listdir("/dev/shm") if name not in shared] == []


# A child that arms one guard alone, and its parent, which then ends in the way under test.
GUARDED = """
import ctypes, os, sys, time
guard, how = sys.argv[1:]
read, write = os.pipe()
pid = os.fork()
if not pid:
    os.close(write)
    from magi2_native.distributed import orphan
    if guard == "die_with_parent":
        orphan.die_with_parent(os.getppid())
    else:
        getattr(orphan, guard)(read)
    print(os.getpid(), flush=True)
    if how == "stuck":
        ctypes.PyDLL(None).usleep(60_000_000)
    time.sleep(60)
os.close(read)
os.set_inheritable(write, how == "inherited")  # somebody else keeps the pipe open
if how == "inherited":
    os.spawnv(os.P_NOWAIT, "/bin/sleep", ["sleep", "30"])
sys.stdin.readline()
if how == "execv":
    os.execv("/bin/sleep", ["sleep", "30"])
os._exit(0)
"""


@pytest.mark.parametrize(
    ("guard", "how", "ends"),
    [
        ("exit_at_close", "exit", True),
        ("exit_at_close", "execv", True),
        ("exit_at_close", "stuck", False),
        ("signal_at_close", "exit", True),
        ("signal_at_close", "execv", True),
        ("signal_at_close", "stuck", True),
        ("signal_at_close", "inherited", False),
        ("die_with_parent", "exit", True),
        ("die_with_parent", "stuck", True),
        ("die_with_parent", "inherited", True),
        ("die_with_parent", "execv", False),
    ],
)
def test_each_guard_alone_covers_what_the_others_do_not(guard: str, how: str, ends: bool, mark: str) -> None:
    with start(GUARDED, mark, guard, how) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(0.3)
        assert alive(child)
        assert parent.stdin is not None
        parent.stdin.write("now\n")
        parent.stdin.flush()
        deadline = time.monotonic() + (5 if ends else 1)
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert alive(child) is not ends
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("guard", ["signal_at_close", "die_with_parent"])
def test_a_parent_that_is_gone_before_the_guard_is_armed_is_noticed(guard: str) -> None:
    program = f"""
import os
from magi2_native.distributed import orphan
read, write = os.pipe()
os.close(write)
orphan.{guard}({"read" if guard == "signal_at_close" else "os.getppid() + 1"})
print("still here", flush=True)
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (1, "", "")


def test_a_worker_arms_all_guards() -> None:
    """Each covers holes of the others, so that a missing one shows in no run of the matrix above."""
    program = """
import ctypes, fcntl, os, threading
from magi2_native.distributed import orphan
read, write = os.pipe()
orphan.arm(read, os.getppid())
asked = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(asked), 0, 0, 0)  # PR_GET_PDEATHSIG
asynchronous = bool(fcntl.fcntl(read, fcntl.F_GETFL) & os.O_ASYNC)
owner = fcntl.fcntl(read, fcntl.F_GETOWN) == os.getpid()
print(asked.value, asynchronous, owner, [thread.name for thread in threading.enumerate()][1:])
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == f"{int(signal.SIGKILL)} True True ['magi2-life']\n", run.stderr


def test_a_forked_copy_of_the_parent_lets_go_of_the_workers() -> None:
    """Another package may fork the server; the copy inherits the parent's ends of the life pipes and closes them."""
    program = """
import os
from magi2_native.distributed.pool import Pool, PoolSpec
pool = Pool(PoolSpec("magi2_native.tests.pool_engines:make_engine")).open()
life = pool._replicas[0].ranks[0].life
copy = os.fork()
if not copy:
    pool.close()
    os._exit(0 if life.closed else 1)
assert os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) == 0, "the copy holds the pipe"
assert not life.closed
print(pool.submit("echo", {"x": 1}).result())
"""
    run = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert run.stdout == "{'x': 1}\n", run.stderr
