"""Starts vfl-server and vfl-party quickly: a launcher process imports them once, and forks a child
for each program.

    python -m vfl.launcher.forks FD

A child is a normal process with its own memory and gRPC, and signals end it. It costs 0.2 s of
processor time instead of 4 s, and shares the memory pages of the imported modules. The fork is
safe, because the launcher runs no multi-threaded operation of torch, opens no channel and uses no
GPU. Some libraries start threads when they are loaded (jemalloc in pyarrow, OpenBLAS). Their own
fork handlers make a fork safe.

No process outlives its starter. A child stops when the other end of its standard input is closed
(see ``child``), and is killed when the launcher is killed. The launcher ends when the other end of
its socket is closed. Signals are sent by the launcher, because only the launcher knows whether a
process id still belongs to its child. This module needs Linux. On other systems, ``launching``
yields None.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from vfl.launcher.child import ORDERLY_S, run
from vfl_common.process import program

_MESSAGE_BYTES = 65536
_KILLED = -signal.SIGKILL
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class Forked:
    """A child of the launcher, with some of the methods of ``subprocess.Popen``."""

    def __init__(self, launcher: Launcher, key: int, args: Sequence[str]) -> None:
        self.args = args
        self.returncode: int | None = None
        self._launcher, self._key = launcher, key
        self._ended = threading.Event()

    def end(self, returncode: int) -> None:
        """Stores the exit code that the launcher reported."""
        self.returncode = returncode
        self._ended.set()

    def poll(self) -> int | None:
        """Returns the exit code; None while the child runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the child to end, and returns its exit code. Raises
        subprocess.TimeoutExpired.
        """
        if not self._ended.wait(timeout) or self.returncode is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal; does nothing if the child has ended."""
        if self.returncode is None:
            self._launcher.send_request({"key": self._key, "signal": int(number)})

    def kill(self) -> None:
        """Kills the child."""
        self.send_signal(signal.SIGKILL)


class Launcher:
    """A client of the launcher process. Any number of federations and threads may use it.

    Args:
        threads: the number of threads of torch and its libraries in all children. OpenMP reads it
            when it is loaded.
        environment: more environment variables for the children.
    """

    def __init__(self, threads: int = 1, environment: Mapping[str, str] | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        limits = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vfl.launcher.forks", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **limits, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Ctrl-C at the terminal must reach only this process.
                start_new_session=True,
            )
        self._begin()

    def _begin(self) -> None:
        """Starts a thread that reads the launcher's messages from the socket."""
        self._children: dict[int, Forked] = {}
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, name="launcher", daemon=True)
        self._reader.start()

    @property
    def has_ended(self) -> bool:
        """Whether the launcher process has ended, so that it starts no child any more."""
        return self._has_ended

    def start(
        self,
        args: Sequence[str],
        *,
        stdin: int,
        stdout: int,
        stderr: int,
        cwd: Path,
        modules: Sequence[Path] = (),
    ) -> Forked:
        """Starts one of ``child.PROGRAMS`` in a new process, and returns at once. The caller must
        close its file descriptors.

        ``modules``: the first folders of the child's ``sys.path``.
        """
        with self._lock:
            child = Forked(self, key := next(self._keys), args)
            if self._has_ended:
                child.end(_KILLED)
                return child
            self._children[key] = child
        request = {
            "key": key,
            "args": list(args),
            "cwd": str(cwd),
            "modules": [str(folder) for folder in modules],
        }
        self.send_request(request, stdin, stdout, stderr)
        return child

    def send_request(self, request: Mapping[str, Any], *fds: int) -> None:
        """Sends a request to the launcher. Does nothing if the launcher has ended; ``_read`` then
        marks its children as ended.
        """
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)

    def close(self) -> None:
        """Ends the children and then the launcher."""
        self._end()
        try:
            self._process.wait(timeout=2 * ORDERLY_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _end(self) -> None:
        """Closes the socket. The launcher then ends its children and itself."""
        # The launcher may have ended already.
        with contextlib.suppress(OSError):
            # After close() alone, the reading thread would keep the socket open.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        while data := self._receive():
            answer = json.loads(data)
            with self._lock:
                child = self._children.pop(answer["key"])
            child.end(os.waitstatus_to_exitcode(answer["status"]))
        with self._lock:
            self._has_ended, children = True, list(self._children.values())
        for child in children:
            # The kernel has killed the children together with the launcher.
            child.end(_KILLED)

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(_MESSAGE_BYTES)
        except OSError:
            return b""


def can_fork() -> bool:
    """Returns whether processes can be forked: on Linux, without ``VFL_NO_FORK=1``."""
    return sys.platform == "linux" and os.environ.get("VFL_NO_FORK", "0") == "0"


@contextlib.contextmanager
def run_launcher(threads: int) -> Iterator[Launcher | None]:
    """Runs a launcher during the ``with`` block. Yields None if processes cannot be forked; see
    ``can_fork``.
    """
    if not can_fork():
        yield None
        return
    launcher = Launcher(threads)
    try:
        yield launcher
    finally:
        launcher.close()


# -- the launcher's own side
# ----------------------------------------------------------------------


def import_programs() -> None:
    """Imports the modules that every party needs until its first step. torchvision and scikit-learn
    are imported later, by the recipes that need them.
    """
    with program.pause_gc():
        # The children use these imported modules.
        import vfl_server.app
        import vfl_server.cli  # noqa: F401
        from vfl_party.models import metrics
        from vfl_party.phases.course import list_kinds, load_method

        for kind in list_kinds():
            # A party whose recipe names a broken method reports the error.
            with contextlib.suppress(Exception):
                load_method(kind)
        metrics.functional()
    gc.collect()
    # A garbage collection in a child would copy every page.
    program.reduce_gc()


def serve(requests: socket.socket) -> None:
    """Forks children on request until the other end is closed. Only the parent returns from this
    function, never a child.
    """
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_reader, False)
    os.set_blocking(wake_writer, False)
    signal.signal(signal.SIGCHLD, _ignore_signal)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    # {key: process id}
    living: dict[int, int] = {}
    give_up_s: float | None = None
    while give_up_s is None or (living and time.monotonic() < give_up_s):
        sockets = [requests.fileno()] if give_up_s is None else []
        ready, _, _ = select.select([wake_reader, *sockets], [], [], None if sockets else 1.0)
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            _report_ended(living, requests)
        if requests.fileno() in ready and not _serve_request(requests, living):
            # The children end by themselves, because their standard input is closed.
            give_up_s = time.monotonic() + ORDERLY_S + 2.0
    for pid in living.values():
        os.kill(pid, signal.SIGKILL)


def _ignore_signal(_signal: int, _frame: FrameType | None) -> None:
    return


def _report_ended(living: dict[int, int], requests: socket.socket) -> None:
    for key, pid in list(living.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del living[key]
            # The other end may be closed.
            with contextlib.suppress(OSError):
                requests.send(json.dumps({"key": key, "status": status}).encode())


def _serve_request(requests: socket.socket, living: dict[int, int]) -> bool:
    """Serves one request. Returns False at the end of the stream."""
    try:
        data, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 3)
    except OSError:
        return False
    if not data:
        return False
    request = json.loads(data)
    if "signal" in request:
        if request["key"] in living:
            os.kill(living[request["key"]], request["signal"])
        return True
    launcher = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 and later warn about threads at a fork. The only thread is that of jemalloc,
        # which is safe (see the module's docstring).
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _run_child(request, fds, requests, launcher)
    living[request["key"]] = pid
    for fd in fds:
        os.close(fd)
    return True


def _run_child(
    request: dict[str, Any], fds: list[int], requests: socket.socket, launcher: int
) -> None:
    """Runs the program in the child, joins its threads, and exits at once.

    A normal exit would clear the interpreter's modules. This would copy every page that is shared
    with the launcher, and take seconds.
    """
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        # The children stay in the launcher's session, which Ctrl-C at the terminal does not reach.
        # Linux schedules a session as one group. In separate sessions, the parties would interrupt
        # each other more often (docs/contributing/decisions/0001).
        os.setpgid(0, 0)
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # Sets the process name that ps and top show.
        libc.prctl(_PR_SET_NAME, Path(request["args"][0]).name.encode(), 0, 0, 0)
        if os.getppid() != launcher:
            # The launcher died before PR_SET_PDEATHSIG took effect.
            return
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
            os.close(fd)
        os.chdir(request["cwd"])
        sys.path[:0] = request["modules"]
        run(request["args"])
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    import_programs()
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        serve(asked)
    os._exit(0)
