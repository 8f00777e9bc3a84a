"""Prepares a launcher of the tests, on whose path this folder is: Python imports a module of this
name when it starts.

It imports what most parties load after they are forked. It can run a program with plug-ins, on a
host of ``tests.harness.hosts``, and ``vfl`` and ``torchrun``, whose processes are forks then, too.
"""

# ruff: noqa: F401 - for the children

import contextlib
import ctypes
import encodings.idna
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cryptography.hazmat.backends.openssl.backend
import grpc._channel
import grpc._interceptor
import grpc._server
import opacus.accountants
import safetensors.torch
import sklearn.datasets
import torch._dynamo
from hugepages import collapse  # type: ignore[import-not-found] # in the same folder
from remembered import remember  # type: ignore[import-not-found]

# Isort: skip - before grpc, which reads what it sets.
import vfl_common.rpc
import vfl_party.outbound.codecs.identity
from vfl.launcher import forks
from vfl.launcher.child import PROGRAMS
from vfl.launcher.forks import import_programs, serve

# One that opacus adds; in a party it finds ours.
logging.getLogger().handlers.clear()
remember()
sklearn.datasets.load_digits()
sklearn.datasets.load_breast_cancer()
import_programs()
collapse()

# A process that a program starts needs none of the above.
_path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
os.environ["PYTHONPATH"] = os.pathsep.join(
    each for each in _path if each != str(Path(__file__).parent)
)
_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_SLAVE = 0x1000, 0x4000, 0x80000


def _on_host() -> None:
    """Does in a fork what ``ip netns exec SPACE PROGRAM …`` does: enters the host, with its own
    ``/etc/hosts``.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: object) -> None:
        if getattr(libc, name)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    space, sys.argv = sys.argv[3], sys.argv[4:]
    with Path("/run/netns", space).open() as found:
        call("setns", found.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS)
    call("mount", b"none", b"/", None, _MS_REC | _MS_SLAVE, None)
    call(
        "mount",
        str(Path("/etc/netns", space, "hosts")).encode(),
        b"/etc/hosts",
        None,
        _MS_BIND,
        None,
    )
    os.environ["HOME"] = str(Path.cwd().parent)
    PROGRAMS[sys.argv[0]]()


def _plugged() -> None:
    """Runs in a fork a program whose PYTHONPATH is another; imports its plug-ins' methods, as a
    launcher would.
    """
    path, sys.argv = sys.argv[1], sys.argv[2:]
    os.environ["PYTHONPATH"] = path
    sys.path[:0] = path.split(os.pathsep)
    for found in entry_points(group="vfl.methods"):
        found.load()
    PROGRAMS[Path(sys.argv[0]).name]()


class _Forked(subprocess.Popen[bytes]):
    """A process that is forked instead of started."""

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: Any) -> None:
        self._words, self._variables = args, env
        super().__init__(args, env=env)

    def _execute_child(self, *_: Any, **__: Any) -> None:
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.environ.update(self._variables)
            self._become()

    def _become(self) -> None:
        """Runs the program, and ends the process."""
        raise NotImplementedError


class _Rank(_Forked):
    """One of torchrun's."""

    def _become(self) -> None:
        code = 1
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
                # Torchrun's own are not a rank's.
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            sys.argv = list(self._words)
            PROGRAMS[Path(sys.argv[0]).name]()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class _Launcher(_Forked):
    """The launcher of a program ``vfl``: has no other file than its socket, or it would not see the
    end of ``vfl``.
    """

    def _become(self) -> None:
        os.setsid()
        kept = int(self._words[-1])
        for fd in [int(name) for name in os.listdir("/proc/self/fd")]:  # noqa: PTH208 - numbers
            if fd not in (2, kept):
                with contextlib.suppress(OSError):
                    os.close(fd)
        # Which is 0.
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        with socket.socket(fileno=kept) as requests:
            serve(requests)
        os._exit(0)


def _vfl() -> None:
    from vfl.cli import main

    vars(forks)["subprocess"] = SimpleNamespace(**vars(subprocess) | {"Popen": _Launcher})
    main()


def _torchrun() -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.run import main

    subprocess_handler.Popen = _Rank  # type: ignore[assignment, attr-defined]
    main(sys.argv[1:])


def _shared() -> None:
    """Serves another worker: the socket to it is this fork's standard output."""
    with socket.socket(fileno=os.dup(1)) as requests:
        with Path(os.devnull).open("wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        serve(requests)


PROGRAMS.update(
    {"plugged": _plugged, "ip": _on_host, "torchrun": _torchrun, "shared": _shared, "vfl": _vfl}
)
