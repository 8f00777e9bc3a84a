"""Runs one of the other programs as a child process that ends when its launcher ends, for whatever
reason.

    python -m vfl.launcher.child vfl-party run bank.toml

The starter holds the other end of this process's standard input and never writes to it. When the
starter is gone, even by SIGKILL, the kernel closes that end; this process then stops as if by
SIGTERM. Unlike Linux's ``PR_SET_PDEATHSIG`` this needs no code between fork and exec and works on
every Unix. It runs with the interpreter of ``vfl``, so it needs no activated environment.
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


def _server() -> None:
    from vfl_server.__main__ import main

    main()


def _party() -> None:
    from vfl_party.__main__ import main

    main()


# {program: its function}, which imports it.
PROGRAMS: dict[str, Callable[[], None]] = {"vfl-server": _server, "vfl-party": _party}


def run(args: Sequence[str]) -> None:
    """Runs the program ``args[0]`` (its name, or a path that ends in it) with the other arguments;
    exits.
    """
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
