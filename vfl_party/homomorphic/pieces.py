"""Cuts long computations into pieces, between which other threads run.

A call of HEU holds Python's global lock until it returns. Meanwhile the party cannot send
heartbeats, without which the server considers it lost.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# The seconds that a piece should take.
SECONDS = 0.25
# Seconds between two pieces: enough for all threads that wait for the lock.
REST = 0.001
# Items of the first piece, for items of some 10 ms (slow) or some 0.01 ms (fast).
SLOW, FAST = 16, 4096
# The largest factor by which a piece grows from one to the next.
_GROWTH = 4


class Pace:
    """Learns how many items of one kind of work take ``SECONDS``; it begins with ``first``."""

    def __init__(self, first: int) -> None:
        self.room = first

    def pieces(self, count: int) -> Iterator[slice]:
        """Yields the places of ``count`` items, piece by piece. The work on a piece must end before
        the next one is taken.
        """
        start = 0
        while start < count:
            piece = slice(start, min(count, start + self.room))
            with self.taking(piece.stop - start):
                yield piece
            start = piece.stop

    @contextmanager
    def taking(self, items: int) -> Iterator[None]:
        """Measures one call on ``items``, and lets other threads run after it."""
        began = time.monotonic()
        yield
        spent = max(time.monotonic() - began, 1e-9)
        fit = max(1, int(items * SECONDS / spent))
        if spent > SECONDS:
            self.room = min(self.room, fit)
        elif 2 * items > self.room:
            self.room = max(self.room, min(fit, _GROWTH * self.room))
        time.sleep(REST if 2 * spent > SECONDS else 0.0)
