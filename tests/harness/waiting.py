"""Waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
# Nothing should come near it.
WAIT_S = 30.0


def wait_until(
    read: Callable[[], Found], holds: Callable[[Found], object] = bool, timeout_s: float = WAIT_S
) -> Found:
    """Reads until it holds; returns what was read last. Fails if it does not hold in time."""
    give_up_s = time.monotonic() + timeout_s
    while not holds(found := read()):
        assert time.monotonic() < give_up_s, f"after {timeout_s} s: {found}"
        time.sleep(0.005)
    return found
