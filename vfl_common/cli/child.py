"""One of the other programs as a child process that ends when its launcher does, however the launcher ended.

    python -m vfl_common.cli.child vfl-party run bank.toml

Whoever starts it holds the other end of this process's standard input and never writes to it. When that one is gone,
even by SIGKILL, the kernel closes that end; this process then stops as if by SIGTERM. Unlike Linux's
``PR_SET_PDEATHSIG`` this needs no code between fork and exec and works on every Unix. Started with the interpreter of
``vfl``, it needs no activated environment either.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = {"vfl-server": "vfl_server.cli", "vfl-party": "vfl_party.cli"}  # by name: nothing is imported before it runs
ORDERLY_S = 10.0


def run(args: Sequence[str]) -> None:
    """Runs the program named first, or by a path that ends in its name, with the arguments after it; exits."""
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    sys.argv = list(args)
    importlib.import_module(PROGRAMS[Path(args[0]).name]).main()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORDERLY_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run(sys.argv[1:])
