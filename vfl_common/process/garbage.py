"""Reduces the work of Python's garbage collector, which searches for cycles of references.

All other objects are freed as soon as nothing refers to them, as always.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

# New objects between two searches; a step makes thousands, and hardly any of them is in a cycle.
YOUNG = 20_000


def reduce_gc() -> None:
    """Makes the collector search less often, and never among the existing objects, mainly torch's
    modules.
    """
    gc.freeze()
    _raise_threshold()


@contextlib.contextmanager
def gc_reduced() -> Iterator[None]:
    """Makes the collector search less often during a block, in a process that runs other code, too.

    It freezes no objects: unfreezing them also unfreezes those that the other code has frozen.
    """
    thresholds = gc.get_threshold()
    _raise_threshold()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _raise_threshold() -> None:
    """Raises the threshold to ``YOUNG``; a threshold of 0, which turns the search off, stays."""
    threshold, *others = gc.get_threshold()
    if threshold:
        gc.set_threshold(max(threshold, YOUNG), *others)


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Turns the collector off during a block of imports: torch's modules are a million objects, and
    none of them is freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
