"""One of the other programs as a child process that ends when its launcher does, however the launcher ended.

    python -m vfl_common.cli.child vfl-party run bank.toml

The launcher holds the other end of this process's standard input and never writes to it. When the launcher is gone,
even by SIGKILL, the kernel closes that end; this process then stops as if by SIGTERM. Unlike Linux's
``PR_SET_PDEATHSIG`` this needs no code between fork and exec and works on every Unix. Started with the launcher's own
interpreter, it needs no activated environment either.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time

PROGRAMS = {"vfl-server": "vfl_server.cli", "vfl-party": "vfl_party.cli"}  # by name: nothing is imported before it runs
_ORDERLY_S = 10.0


def main() -> None:
    """Runs the program named first with the arguments after it."""
    program, *arguments = sys.argv[1:]
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    sys.argv = [program, *arguments]
    importlib.import_module(PROGRAMS[program]).main()


def _end_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ORDERLY_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
