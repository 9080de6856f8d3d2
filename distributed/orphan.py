"""No worker outlives its parent: three guards, each of which covers holes of the others (60 §6.5).

Standard library only: a worker arms them before it imports anything large.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


def arm(life: int, parent: int) -> None:
    """Arm all guards. `life`: read end of a pipe of which only the parent holds the write end; `parent`: its pid.

    The kernel delivers SIGIO to the one owner of an open pipe end, so each worker needs a pipe of its own.
    """
    die_with_parent(parent)
    signal_at_close(life)
    exit_at_close(life)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux).

    It covers a parent that is killed while its descriptors live on in another process. The parent may have died before
    the call; it is recognised by its pid, not by pid 1, which in a container may be the parent itself.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def signal_at_close(life: int) -> None:
    """Have the kernel end this process when the pipe closes, even while a C call holds the interpreter (Linux).

    It covers `execv` and, unlike a thread, works when no Python code can run.
    """
    if sys.platform != "linux":
        return
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    closed = select.poll()
    closed.register(life, 0)
    if closed.poll(0):  # it closed before the signal was asked for
        os._exit(1)


def exit_at_close(life: int) -> None:
    """End this process from a thread when the pipe closes: works on every system."""

    def watch() -> None:
        while os.read(life, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="magi2-life", daemon=True).start()
