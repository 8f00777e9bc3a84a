"""On SIGHUP, replaces this process by a new one of the same command, so that an upgrade, a new key
or a new setting takes effect without downtime.

1. The old process starts the new one, which loads while the old one continues to work. 2. The new
process reports that it has loaded. The old one answers its open requests, and ends. 3. The new
process serves. It has inherited the listening sockets, so new connections wait in the kernel
meanwhile.

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
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError

# The environment variable with the file descriptors that the new process inherits.
_INHERITED = "VFL_HANDOVER"
_LOADED = b"loaded"
# The maximum time for which the new process waits until the old one has ended.
_END_S = 60.0
_READ_BYTES = 1 << 16

# Open sockets to new processes. A new process waits until the socket closes, which happens when
# this process ends.
_open_sockets: list[socket.socket] = []


def on_hangup(act: Callable[[], object]) -> None:
    """Makes SIGHUP call ``act`` in the main thread. Has no effect if it is called in another
    thread.
    """
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


def get_command() -> list[str]:
    """Returns the command that starts this program again.

    A script's first line names the interpreter of its release. Its path may be a link, such as
    ``/opt/vfl``, that leads to another release by now.
    """
    script = Path(sys.orig_argv[1]).absolute() if len(sys.orig_argv) > 1 else None
    if script is not None and script.is_file() and os.access(script, os.X_OK):
        with script.open("rb") as file:
            if file.read(2) == b"#!":
                return [str(script), *sys.orig_argv[2:]]
    return [sys.executable, *sys.orig_argv[1:]]


def hand_over(sockets: Mapping[str, socket.socket], say: Callable[[], Mapping[str, Any]]) -> int:
    """Starts a new process of this program's command, and returns its process id once it has
    loaded. The caller must then end this process. Raises InputError if the new process ends before
    it has loaded.

    ``sockets``: {name: listening socket that the new process inherits}. ``say``: returns the state
    to send to the new process.
    """
    our_end, new_end = socket.socketpair()
    descriptors = {name: listener.fileno() for name, listener in sockets.items()}
    inherited = json.dumps({"line": new_end.fileno(), "sockets": descriptors})
    with new_end:
        process = subprocess.Popen(
            get_command(),
            env={**os.environ, _INHERITED: inherited},
            pass_fds=[new_end.fileno(), *descriptors.values()],
        )
    try:
        loaded = our_end.recv(len(_LOADED))
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
    our_end.sendall(json.dumps(say()).encode())
    _open_sockets.append(our_end)
    return process.pid


@dataclass(frozen=True)
class Predecessor:
    """The old process, which this process replaces. ``sockets``: {name: inherited listening
    socket}.
    """

    line: socket.socket
    sockets: Mapping[str, socket.socket]

    def wait(self) -> dict[str, Any]:
        """Reports that this process has loaded, waits until the old process has ended, and returns
        the old process's state. Raises InputError if it does not end.
        """
        data = b""
        self.line.settimeout(_END_S)
        try:
            self.line.sendall(_LOADED)
            # The other end of the socket closes when the old process ends.
            while chunk := self.line.recv(_READ_BYTES):
                data += chunk
        except OSError as error:
            raise InputError(
                Code.ADDRESS_IN_USE,
                f"SIGHUP: the previous process has not ended ({error.strerror or 'timeout'}). End "
                "it, and start the program again.",
            ) from None
        if not data:
            # The old process was killed before it could send its state.
            raise InputError(
                Code.ADDRESS_IN_USE,
                "SIGHUP: the previous process ended without handing over. Start the program again.",
            )
        state: dict[str, Any] = json.loads(data)
        return state


def get_predecessor() -> Predecessor | None:
    """Returns the old process that this process replaces; None if this process was not started by a
    handover.
    """
    inherited = os.environ.pop(_INHERITED, None)
    if inherited is None:
        return None
    fields = json.loads(inherited)
    sockets = {name: socket.socket(fileno=number) for name, number in fields["sockets"].items()}
    predecessor = Predecessor(socket.socket(fileno=fields["line"]), sockets)
    for inherited_socket in (predecessor.line, *sockets.values()):
        inherited_socket.set_inheritable(False)
    return predecessor
