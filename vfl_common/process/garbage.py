"""How often Python's garbage collector looks for objects that refer to each other in a circle.

All other objects go when nothing refers to them, as ever.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New objects between two searches; a step makes thousands, of which hardly any is in a circle.
YOUNG = 20_000


def seldom() -> None:
    """Searches less often, and never among the objects that are there already: torch's modules
    above all.
    """
    gc.freeze()
    _raise_threshold()


@contextlib.contextmanager
def less_often() -> Iterator[None]:
    """Searches less often during a block, in a process that is not ours alone.

    Nothing is frozen: whether somebody else has frozen objects before, which have to stay so, takes
    counting them.
    """
    thresholds = gc.get_threshold()
    _raise_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _raise_threshold() -> None:
    """Raises the threshold to ``YOUNG``; one of 0, by which somebody has turned searching off,
    stays.
    """
    threshold, *others = gc.get_threshold()
    if threshold:
        gc.set_threshold(max(threshold, YOUNG), *others)


@contextlib.contextmanager
def unsearched() -> Iterator[None]:
    """Does not search during a block that imports: torch's modules are a million objects, and none
    of them goes.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
