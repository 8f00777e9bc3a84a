"""How often Python's garbage collector looks for objects that refer to each other in a circle.

All other objects go when nothing refers to them, as ever.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG = 20_000  # new objects between two searches; a step makes thousands, of which hardly any is in a circle


def seldom() -> None:
    """Searches less often, and never among the objects that are there already: torch's modules above all.

    A threshold of 0, by which somebody has turned searching off, stays.
    """
    gc.freeze()
    threshold, *others = gc.get_threshold()
    if threshold:
        gc.set_threshold(max(threshold, YOUNG), *others)


@contextlib.contextmanager
def unsearched() -> Iterator[None]:
    """Does not search during a block that imports: torch's modules are a million objects, and none of them goes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
