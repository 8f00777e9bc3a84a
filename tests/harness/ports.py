"""Ports for programs that are started again at the address that they had.

The system gives port 0 to whoever asks next: while such a program is away, another test's server may
get its port, and whoever waits for the program finds a stranger. So each port is reserved for one
process of tests, by a lock on a byte of a file that all of them share.
"""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from pathlib import Path

# Below the ports that Linux and macOS hand out by themselves.
_FIRST, _LAST = 10_000, 32_000
_TRIES = 100
# Not seeded: workers must not choose the same.
_choice = random.SystemRandom()
# Closing any descriptor of the file would release all locks of this process.
_file = (Path(tempfile.gettempdir()) / "vfl-test-ports").open("ab")
_reserved: set[int] = set()


def address() -> str:
    """Returns an address of this machine where nobody listens, and no other test will."""
    for _ in range(_TRIES):
        port = _choice.randint(_FIRST, _LAST)
        if not _reserve(port):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{port}"
    raise RuntimeError(f"no port is free between {_FIRST} and {_LAST}")


def _reserve(port: int) -> bool:
    # A process may lock its own byte again.
    if port in _reserved:
        return False
    try:
        fcntl.lockf(_file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _reserved.add(port)
    return True
