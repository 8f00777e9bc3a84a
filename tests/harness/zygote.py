"""Starts ``vfl-server`` and ``vfl-party`` without paying for their imports each time.

One process (the zygote) imports the programs once and forks a child for each start. A child is a process like any
other: its own memory, its own gRPC, killed by SIGKILL. The zygote has no threads and no channels, so that a fork is
safe. A party costs 0.2 s of processor time so, instead of 4 s: tests of federations with four parties on two cores
take seconds. ``VFL_TEST_FRESH=1`` in the environment, or ``Federation(fresh=True)``, starts the installed commands.

The zygote and its children end when the test process ends: it reads end-of-file then, and kills its children.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

PROGRAMS = ("vfl-server", "vfl-party")
_MESSAGE_BYTES = 65536
_START_S = 60.0


class Forked:
    """A child of the zygote; the part of ``subprocess.Popen`` that ``Program`` uses."""

    def __init__(self, zygote: Zygote, args: list[str]) -> None:
        self._zygote = zygote
        self.args = args
        self.pid = 0
        self.returncode: int | None = None
        self.started, self.ended = threading.Event(), threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Through the zygote, which alone knows that the id is still this child's."""
        self._zygote.send({"signal": int(number), "pid": self.pid})

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The test process's side. One zygote for all tests of a session: ``Zygote.shared()``."""

    _shared: Zygote | None = None

    def __init__(self, environment: dict[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._children: dict[int, Forked] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
            )
        threading.Thread(target=self._read, name="zygote", daemon=True).start()
        atexit.register(self.close)

    @classmethod
    def shared(cls, environment: dict[str, str]) -> Zygote:
        if cls._shared is None or cls._shared._process.poll() is not None:
            cls._shared = cls(environment)
        return cls._shared

    def start(self, args: list[str], cwd: Path, stdout: int, stderr: int) -> Forked:
        """``args[0]`` is one of PROGRAMS, or a path that ends in it."""
        child = Forked(self, args)
        with self._lock:
            key = len(self._children)
            self._children[key] = child
        request = {"key": key, "args": args, "cwd": str(cwd)}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [stdout, stderr])
        if not child.started.wait(_START_S):
            raise AssertionError(f"the zygote did not start {args} within {_START_S} s")
        return child

    def send(self, request: dict[str, Any]) -> None:
        self._socket.send(json.dumps(request).encode())

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # close alone would leave the reading thread holding it open
        self._socket.close()
        self._process.wait(timeout=10)

    def _read(self) -> None:
        while True:
            try:
                data = self._socket.recv(_MESSAGE_BYTES)
            except OSError:
                return
            if not data:
                return
            answer = json.loads(data)
            child = self._children[answer["key"]]
            if "pid" in answer:
                child.pid = answer["pid"]
                child.started.set()
            else:
                child.returncode = os.waitstatus_to_exitcode(answer["status"])
                child.ended.set()


# -- the zygote's own side ------------------------------------------------------------------------------------------


def _import_programs() -> None:
    import sklearn.datasets
    import torch

    import vfl_party.app
    import vfl_party.methods
    import vfl_server.app
    from vfl_common import metrics

    for kind in vfl_party.methods.kinds():
        vfl_party.methods.load_method(kind)
    metrics._functional()
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports torch._dynamo and sympy
    _ = sklearn.datasets, vfl_party.app, vfl_server.app
    gc.freeze()  # a child that collected garbage would copy every page


def _serve(requests: socket.socket) -> None:
    """Forks until the other end is closed. Returns in the parent at the end, and never in a child."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)

    def note(_signal: int, _frame: FrameType | None) -> None:
        return

    signal.signal(signal.SIGCHLD, note)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test process; our end is its end-of-file
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    living: dict[int, int] = {}  # process id -> key
    while True:
        ready, _, _ = select.select([requests, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid in list(living):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    requests.send(json.dumps({"key": living.pop(pid), "status": status}).encode())
        if requests in ready:
            data, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
            if not data:
                for pid in living:
                    os.kill(pid, signal.SIGKILL)
                return
            request = json.loads(data)
            if "signal" in request:
                if request["pid"] in living:
                    os.kill(request["pid"], request["signal"])
                continue
            pid = os.fork()
            if pid == 0:
                for fd in (wake, woken):
                    os.close(fd)
                requests.close()
                _become(request["args"], request["cwd"], fds)
            living[pid] = request["key"]
            for fd in fds:
                os.close(fd)
            requests.send(json.dumps({"key": request["key"], "pid": pid}).encode())


def _become(args: list[str], cwd: str, fds: list[int]) -> None:
    """In the child: the program, to its end, its threads joined; then out at once.

    Taking the interpreter's modules apart would copy every page of the zygote's, which takes longer than the tests.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, fd in enumerate(fds, 1):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(cwd)
    sys.argv = args
    from vfl_party.cli import main as party
    from vfl_server.cli import main as server

    code = 1
    try:
        {"vfl-server": server, "vfl-party": party}[Path(args[0]).name]()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _import_programs()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)
    os._exit(0)
