"""One of the other programs as a child process that ends when its launcher does, however the launcher ended.

    python -m vfl.launcher.child vfl-party run bank.toml

Whoever starts it holds the other end of this process's standard input and never writes to it. When that one is gone,
even by SIGKILL, the kernel closes that end; this process then stops as if by SIGTERM. Unlike Linux's
``PR_SET_PDEATHSIG`` this needs no code between fork and exec and works on every Unix. Started with the interpreter of
``vfl``, it needs no activated environment either.
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
    from vfl_server.cli import main

    main()


def _party() -> None:
    from vfl_party.cli import main

    main()


PROGRAMS: dict[str, Callable[[], None]] = {"vfl-server": _server, "vfl-party": _party}  # imported when it runs


def run(args: Sequence[str]) -> None:
    """Runs the program named first, or by a path that ends in its name, with the arguments after it; exits."""
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
