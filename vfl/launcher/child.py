"""Runs vfl-server or vfl-party as a child process, which ends when its starter ends for any reason.

    python -m vfl.launcher.child vfl-party run bank.toml

The standard input of this process is a pipe to which the starter never writes. When the starter
ends, even by SIGKILL, the kernel closes the other end of the pipe, and this process stops as after
SIGTERM. Unlike ``PR_SET_PDEATHSIG`` of Linux, this needs no code between fork and exec, and works
on every Unix. The child uses the Python interpreter of ``vfl``, so no environment must be
activated.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ORDERLY_S = 10.0


def _run_server() -> None:
    from vfl_server.__main__ import main

    main()


def _run_party() -> None:
    from vfl_party.__main__ import main

    main()


# {program: a function that imports and runs it}
PROGRAMS: dict[str, Callable[[], None]] = {"vfl-server": _run_server, "vfl-party": _run_party}


def run(args: Sequence[str]) -> None:
    """Runs the program ``args[0]``, a name or a path, with the arguments ``args[1:]``."""
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    sys.argv = list(args)
    PROGRAMS[Path(args[0]).name]()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORDERLY_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run(sys.argv[1:])
