"""The first file that a worker process runs: it makes the package importable there (60 §6.2, §6.3).

ComfyUI loads the pack under the path of its folder, a name that a new process cannot import, and the folder's own
subfolders have common names. So the process target is `runpy.run_path` on this file, with plain arguments and open
files only; this file arms the guards against outliving the parent, cleans the environment, registers the repository
root as package `magi2_native` without running its `__init__`, and hands over. Torch is imported last.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

PACKAGE = "magi2_native"


def register_package(root: str) -> None:
    """Make `magi2_native` a package whose modules are found in the folder `root`."""
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [root]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)


def main(
    root: str, parent: int, ranks: int, channel: Connection, life: Connection, page: Connection, crash: Connection,
    listener: Connection | None,
) -> None:  # fmt: skip
    """Become one of `ranks` local workers; never returns.

    root: the package's folder; parent: pid of the process that started this one. The others carry open files, the one
    thing multiprocessing's connections are used for: the socket to the client, the read end of the life pipe, the page
    of `agreement`, the file that holds what a crash leaves, and on rank 0 of several the rendezvous's listening socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then stops the job
    sys.argv = ["magi2-worker"]
    register_package(root)
    try:
        importlib.import_module(f"{PACKAGE}.distributed.orphan").arm(life.fileno(), parent)
        importlib.import_module(f"{PACKAGE}.distributed.environment").clean_environment(os.environ, ranks)
        for file in (channel, life, page, crash, listener):
            if file is not None:
                os.set_inheritable(file.fileno(), False)  # not for programs that a worker starts
        files = [file and file.fileno() for file in (channel, page, crash, listener)]
        importlib.import_module(f"{PACKAGE}.distributed.worker").serve(*files)
        code = 0
    except BaseException:
        os.write(crash.fileno(), traceback.format_exc().encode())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not the interpreter's own end: communication libraries may hang in it


if __name__ == "magi2_bootstrap":
    main(**globals()["arguments"])
