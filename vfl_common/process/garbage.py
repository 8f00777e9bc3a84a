"""Reduces the work of Python's garbage collector, which searches for reference cycles.

Objects that are not in cycles are freed by reference counting as before.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# The number of new objects between two collections. A step creates thousands of objects, of which
# hardly any are in cycles.
YOUNG = 20_000


def reduce_gc() -> None:
    """Makes the collector run less often, and exempts the existing objects, which are mainly
    torch's modules.
    """
    gc.freeze()
    _raise_threshold()


@contextlib.contextmanager
def reduce_gc_in_block() -> Iterator[None]:
    """Makes the collector run less often during the block, for a process that also runs other code.

    It does not freeze objects, because unfreezing them would also unfreeze objects that other code
    has frozen.
    """
    thresholds = gc.get_threshold()
    _raise_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _raise_threshold() -> None:
    """Raises the threshold to ``YOUNG``. A threshold of 0, which turns the collector off, is
    kept.
    """
    threshold, *others = gc.get_threshold()
    if threshold:
        gc.set_threshold(max(threshold, YOUNG), *others)


@contextlib.contextmanager
def pause_gc() -> Iterator[None]:
    """Turns the collector off during a block of imports, because torch's modules have a million
    objects and none of them can be freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
