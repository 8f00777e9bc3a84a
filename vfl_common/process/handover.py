"""Hands over to a new process of the same command on SIGHUP, so that an upgrade, a new key or
another setting takes effect without a pause.

1. The old process starts the new one, which loads while the old one works.
2. The new process reports that it has loaded. The old one answers its open requests, and ends.
3. The new process serves. It has inherited the listening sockets, so new connections wait in the
   kernel meanwhile.

If the new process ends before it has loaded, the old one goes on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from vfl_common.errors import Code, InputError

# The environment variable that tells the new process what it inherits.
_INHERITED = "VFL_HANDOVER"
_LOADED = b"loaded"
# How long the new process waits for the old one to end.
_END_S = 60.0
_READ_BYTES = 1 << 16

# Sockets to new processes, which stop waiting when this process is gone and the socket closes.
_open: list[socket.socket] = []


def on_hangup(act: Callable[[], object]) -> None:
    """Makes SIGHUP call ``act`` in the main thread. Does nothing if called in another thread."""
    with suppress(ValueError):
        signal.signal(signal.SIGHUP, lambda _number, _frame: act())


def notify(text: str) -> None:
    """Sends a notification to systemd, if it has started this program (``Type=notify``)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        line.send(text.encode())


def hand_over(sockets: Mapping[str, socket.socket], say: Callable[[], Mapping[str, Any]]) -> int:
    """Starts a new process of this program's command. Returns its process id once it has loaded;
    this process then ends. Raises InputError if the new process ends before.

    ``sockets``: {name: a listening socket to inherit}. ``say``: returns the state for the new
    process.
    """
    ours, theirs = socket.socketpair()
    numbers = {name: listener.fileno() for name, listener in sockets.items()}
    inherited = json.dumps({"line": theirs.fileno(), "sockets": numbers})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, _INHERITED: inherited},
            pass_fds=[theirs.fileno(), *numbers.values()],
        )
    try:
        loaded = ours.recv(len(_LOADED))
    except BaseException:
        process.kill()
        raise
    if loaded != _LOADED:
        raise InputError(
            Code.CONFIG_INVALID,
            f"SIGHUP: the new process has ended with exit code {process.wait()}, and this process "
            "goes on. Correct the error that it reported.",
        )
    notify(f"MAINPID={process.pid}")
    ours.sendall(json.dumps(say()).encode())
    _open.append(ours)
    return process.pid


@dataclass(frozen=True)
class Predecessor:
    """The process whose work this one takes over. ``sockets``: {name: its listening socket}."""

    line: socket.socket
    sockets: Mapping[str, socket.socket]

    def wait(self) -> dict[str, Any]:
        """Reports that this process has loaded, waits until the other one has ended, and returns
        its state. Raises InputError if it does not end.
        """
        data = b""
        self.line.settimeout(_END_S)
        try:
            self.line.sendall(_LOADED)
            # The other end is closed when its process is gone.
            while part := self.line.recv(_READ_BYTES):
                data += part
        except OSError as error:
            raise InputError(
                Code.ADDRESS_IN_USE,
                f"SIGHUP: the previous process has not ended ({error.strerror or 'timeout'}). End "
                "it, and start the program again.",
            ) from None
        if not data:
            # The process was killed, and its sockets are as a crash leaves them.
            raise InputError(
                Code.ADDRESS_IN_USE,
                "SIGHUP: the previous process ended without handing over. Start the program again.",
            )
        state: dict[str, Any] = json.loads(data)
        return state


def get_predecessor() -> Predecessor | None:
    """Returns the process whose work this one takes over; None if it takes over from nobody."""
    inherited = os.environ.pop(_INHERITED, None)
    if inherited is None:
        return None
    fields = json.loads(inherited)
    sockets = {name: socket.socket(fileno=number) for name, number in fields["sockets"].items()}
    before = Predecessor(socket.socket(fileno=fields["line"]), sockets)
    for inherited_socket in (before.line, *sockets.values()):
        inherited_socket.set_inheritable(False)
    return before
