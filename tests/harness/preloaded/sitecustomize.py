"""Prepares the launcher that forks the programs of the tests. ``VFL_TEST_FRESH=1`` switches it off.

A program that is started anew imports torch and gRPC for 4 s; a fork of a process that has them
costs 0.2 s. So most tests fork their programs from one launcher (``vfl.launcher.forks``), as
``vfl simulate`` does.

**When.** Python imports a module with this name when it starts, if it finds one. It finds this one
in the launcher alone: ``tests.harness.sharing.preloaded`` puts this folder on that one process's
``PYTHONPATH``, and this module takes it away again. pytest, the product, and a program that is
started anew never see it.

**What, at the import.** It imports what most parties load after the fork, keeps the two tables of
scikit-learn that most tests read (``remembered``), and puts its memory into huge pages
(``hugepages``). Then it adds to ``vfl.launcher.child.PROGRAMS`` what the launcher can run beside
``vfl-server`` and ``vfl-party``:

==============  ==============================================================================
``float64``     A program in float64 (``tests.harness.preloaded.float64``).
``plugged``     A program with another ``PYTHONPATH``, whose plug-ins it imports first.
``ip``          A program on a host of ``tests.harness.hosts``. The fork enters the network
                namespace itself and mounts the host's own ``/etc/hosts``, as ``ip netns exec``
                does.
``vfl``         The command. The launcher that it would start is a fork: the name
                ``subprocess`` in ``vfl.launcher.forks`` gets another ``Popen``.
``torchrun``    Its ranks are forks: torch's ``subprocess_handler`` gets another ``Popen``.
``shared``      A launcher for another worker of pytest-xdist (``tests.harness.sharing``).
==============  ==============================================================================

**What is replaced.** The two functions of scikit-learn are replaced in the launcher, and so in all
forks. Each ``Popen`` is replaced in the fork that runs the program, and ends with it. ``_Forked`` is
a ``subprocess.Popen`` with one changed method: it forks, where the original executes a file.

**Debugging.** With ``VFL_TEST_FRESH=1`` this folder is on no path. Programs are the installed
commands, and ``vfl`` starts its own launcher. If a test passes so and fails otherwise, look here.
An exception in this module does not end the launcher: Python writes ``Error in sitecustomize`` to
its standard error and goes on, and programs then end with a ``KeyError``. This shows the traceback:

    .venv/bin/python tests/harness/preloaded/sitecustomize.py
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
from float64 import main as _float64  # type: ignore[import-not-found] # in the same folder
from hugepages import collapse  # type: ignore[import-not-found]
from remembered import remember  # type: ignore[import-not-found]
from threads import several_threads  # type: ignore[import-not-found]

# Isort: skip - before grpc, which reads what it sets.
import vfl_common.rpc
import vfl_party.outbound.codecs
from vfl.launcher import forks
from vfl.launcher.child import PROGRAMS
from vfl.launcher.forks import import_programs, serve

# One that opacus adds; in a party it finds ours.
logging.getLogger().handlers.clear()
several_threads()
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
    ``/etc/hosts``, and runs the program.
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
    {
        "float64": _float64,
        "plugged": _plugged,
        "ip": _on_host,
        "torchrun": _torchrun,
        "shared": _shared,
        "vfl": _vfl,
    }
)
