"""Lets the workers of pytest-xdist share one launcher: what parties import is imported once, and
held once.

pytest's own process has it. A worker that needs it connects to a socket, and gets a fork that
serves it alone.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path

from vfl.launcher.forks import Launcher

# {machine: its variables}. The older one computes without AVX2, in MKL, oneDNN and ATen.
HERE, OLDER = "here", "older"
MACHINES: dict[str, dict[str, str]] = {
    HERE: {},
    OLDER: {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}
# {machine: the environment's variable with the path of its launcher's socket}.
ADDRESS = {name: f"VFL_TEST_LAUNCHER_{name.upper()}" for name in MACHINES}
# Start the installed commands, not forks of a prepared launcher.
FRESH = "VFL_TEST_FRESH" in os.environ
PRELOADED = Path(__file__).parent / "preloaded"


def program_environment() -> dict[str, str]:
    """Returns an environment with one thread everywhere, as five processes share two cores; with
    several if ``scripts/try-machines`` asks for them.
    """
    threads = os.environ.get("VFL_TESTS_THREADS", "1")
    return os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONWARNINGS": "default",
    }


def preloaded(machine: str = HERE) -> Launcher:
    """Starts a launcher that has imported all that parties need; with ``FRESH``, one as users
    have it.
    """
    given = program_environment() | MACHINES[machine]
    if FRESH:
        return Launcher(1, given)
    modules = filter(None, [str(PRELOADED), given.get("PYTHONPATH", "")])
    # That it is imported before it is run.
    given["PYTHONWARNINGS"] += ",ignore::RuntimeWarning:runpy"
    return Launcher(1, given | {"PYTHONPATH": os.pathsep.join(modules)})


class Shared:
    """The side of pytest's own process: starts a machine's launcher when the first worker asks for
    it.
    """

    def __init__(self, machine: str = HERE) -> None:
        self._machine = machine
        self._folder = tempfile.TemporaryDirectory(prefix="vfl-tests-")
        path = str(Path(self._folder.name) / "launcher")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(path)
        self._socket.listen()
        os.environ[ADDRESS[machine]] = path
        self._launcher: Launcher | None = None
        # A fork ends when the writing end is closed.
        self._alive, self._held = os.pipe()
        self._thread = threading.Thread(target=self._accept, name="launchers", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._socket.accept()
            except OSError:
                # Closed.
                return
            self._launcher = self._launcher or preloaded(self._machine)
            with worker:
                self._launcher.start(
                    ["shared"], stdin=self._alive, stdout=worker.fileno(), stderr=2, cwd=Path("/")
                )

    def close(self) -> None:
        """Ends the launcher and all that it has forked."""
        # Wakes the thread.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        os.close(self._held)
        if self._launcher is not None:
            self._launcher.close()
        os.close(self._alive)
        self._folder.cleanup()


class Joined(Launcher):
    """The side of a worker: a launcher that was forked for it."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(path)
        self._begin()

    def close(self) -> None:
        """Ends what was forked, and lets the launcher end itself."""
        self._end()
