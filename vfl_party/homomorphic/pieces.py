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
# The seconds between two pieces, enough for all threads that wait for the lock.
REST = 0.001
# The number of items in the first piece, for items of about 10 ms (slow) or 0.01 ms (fast).
SLOW, FAST = 16, 4096
# The maximum factor by which the next piece is larger.
_GROWTH = 4


class Pace:
    """Adapts the number of items in a piece, so that a piece takes ``SECONDS``. ``first``: The
    number of items in the first piece.
    """

    def __init__(self, first: int) -> None:
        self.room = first

    def pieces(self, count: int) -> Iterator[slice]:
        """Yields slices that divide ``count`` items into pieces. The caller must finish a piece
        before it takes the next one.
        """
        start = 0
        while start < count:
            piece = slice(start, min(count, start + self.room))
            with self.measuring(piece.stop - start):
                yield piece
            start = piece.stop

    @contextmanager
    def measuring(self, items: int) -> Iterator[None]:
        """Measures the time of the block, which computes ``items`` items, and lets other threads
        run after it.
        """
        began = time.monotonic()
        yield
        elapsed_s = max(time.monotonic() - began, 1e-9)
        fitting_items = max(1, int(items * SECONDS / elapsed_s))
        if elapsed_s > SECONDS:
            self.room = min(self.room, fitting_items)
        elif 2 * items > self.room:
            self.room = max(self.room, min(fitting_items, _GROWTH * self.room))
        time.sleep(REST if 2 * elapsed_s > SECONDS else 0.0)
