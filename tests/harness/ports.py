"""Ports for programs that are started again at the address that they had.

The system gives port 0 to whoever asks next: while such a program is away, another test's server may
get its port, and whoever waits for the program finds a stranger.
"""

from __future__ import annotations

import random
import socket

# Below the ports that Linux and macOS hand out by themselves.
_FIRST, _LAST = 10_000, 32_000
_TRIES = 100
# Not seeded: workers must not choose the same.
_choice = random.SystemRandom()


def address() -> str:
    """Returns an address of this machine where nobody listens."""
    for _ in range(_TRIES):
        found = f"127.0.0.1:{_choice.randint(_FIRST, _LAST)}"
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", int(found.rpartition(":")[2])))
            except OSError:
                continue
            return found
    raise RuntimeError(f"no port is free between {_FIRST} and {_LAST}")
