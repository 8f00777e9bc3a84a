"""Threads that read rows and decode images for a party's main thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# More threads than this wait for the disk, and not for the processor.
MAX_THREADS = 8


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Returns the threads of a process: a fork has none of its parent's."""
    count = min(MAX_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, thread_name_prefix=f"vfl-rows-{process}")


def in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yields ``work(item)`` of each item, in their order, computed by several threads.

    Few results wait at once. Raises what the first item raises whose work fails.
    """
    pool, step = _pool(os.getpid()), 8 * MAX_THREADS
    for start in range(0, len(items), step):
        yield from pool.map(work, items[start : start + step])


def submit(work: Callable[[], R]) -> Future[R]:
    """Has a thread do some work. Returns its result to come."""
    return _pool(os.getpid()).submit(work)
