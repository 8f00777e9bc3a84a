"""Hands the work of a program over to a new process of the same command on SIGHUP: an upgrade, a
new key or another setting then takes no pause.

1. The old process starts the new one, which loads what it needs while the old one works.
2. The new one says so. The old one answers what it has begun, and ends.
3. The new one goes on. It has the old one's listening sockets, so connections that come meanwhile
   wait in the kernel.

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

# In the environment of the new process.
_INHERITED = "VFL_HANDOVER"
_LOADED = b"loaded"
# For the old process to end.
_END_S = 60.0
_MOST_BYTES = 1 << 16

# Lines to a new process: it ends its wait when this process is gone.
_open: list[socket.socket] = []


def on_hangup(act: Callable[[], object]) -> None:
    """Has ``act`` called in the main thread when SIGHUP comes; in vain from another thread."""
    with suppress(ValueError):
        signal.signal(signal.SIGHUP, lambda _number, _frame: act())


def notify(text: str) -> None:
    """Tells systemd something, if it has started this program (``Type=notify``)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        line.send(text.encode())


def hand_over(sockets: Mapping[str, socket.socket], say: Callable[[], Mapping[str, Any]]) -> int:
    """Starts a new process of this program's command. Returns its id once it has loaded: this
    process then ends. Raises InputError if it ends before.

    ``sockets``: {name: a listening socket that it gets}. ``say``: returns what it is told.
    """
    ours, theirs = socket.socketpair()
    numbers = {name: each.fileno() for name, each in sockets.items()}
    given = json.dumps({"line": theirs.fileno(), "sockets": numbers})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, _INHERITED: given},
            pass_fds=[theirs.fileno(), *numbers.values()],
        )
    try:
        loaded = ours.recv(len(_LOADED))
    except BaseException:
        process.kill()
        raise
    if loaded != _LOADED:
        code = process.wait()
        text = f"SIGHUP: the new process has ended with exit code {code}; correct what it says"
        raise InputError(Code.CONFIG_INVALID, f"{text}. This process goes on.")
    notify(f"MAINPID={process.pid}")
    ours.sendall(json.dumps(say()).encode())
    _open.append(ours)
    return process.pid


@dataclass(frozen=True)
class Predecessor:
    """The process whose work this one takes over. ``sockets``: {name: a listening socket}."""

    line: socket.socket
    sockets: Mapping[str, socket.socket]

    def wait(self) -> dict[str, Any]:
        """Says that this process has loaded, and waits until the other one has ended. Returns what
        it has said. Raises InputError if it does not end.
        """
        found = b""
        self.line.settimeout(_END_S)
        try:
            self.line.sendall(_LOADED)
            # The other end is closed when its process is gone.
            while data := self.line.recv(_MOST_BYTES):
                found += data
        except OSError as error:
            text = f"the process before this one has not ended ({error.strerror or 'it is late'})"
            raise InputError(Code.ADDRESS_IN_USE, f"{text}; end it, and start again") from None
        if not found:
            # It was killed, and its peers and sockets are as a crash leaves them.
            text = "handover: the process before this one has ended without a word"
            raise InputError(Code.ADDRESS_IN_USE, f"{text}. Start the program again.")
        told: dict[str, Any] = json.loads(found)
        return told


def predecessor() -> Predecessor | None:
    """Returns the process whose work this one takes over; None if there is none."""
    given = os.environ.pop(_INHERITED, None)
    if given is None:
        return None
    fields = json.loads(given)
    sockets = {name: socket.socket(fileno=number) for name, number in fields["sockets"].items()}
    found = Predecessor(socket.socket(fileno=fields["line"]), sockets)
    for each in (found.line, *sockets.values()):
        each.set_inheritable(False)
    return found
