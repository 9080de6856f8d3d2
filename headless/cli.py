"""The command `magi2`: it imports what the commands need where Ctrl-C is heard, for that takes seconds."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 ended."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # names of files may be no text of this terminal
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:  # no exception here: torch takes one for a numpy that is not there, and goes on
        signal.signal(signal.SIGINT, _leave)
    from .commands import run_command

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_command(arguments)


def _leave(*_: object) -> None:
    os.write(2, b"Interrupted; nothing was written.\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
