"""Threads that read rows and decode images for a party's main thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

# The maximum number of threads. More threads would only wait for the disk.
MAX_THREADS = 8


@cache
def _get_pool(process: int) -> ThreadPoolExecutor:
    """Returns the thread pool of a process. A forked process needs its own pool, because it does
    not inherit threads.
    """
    count = min(MAX_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, thread_name_prefix=f"vfl-rows-{process}")


def map_in_order(work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yields ``work(item)`` for each item in order, computed by several threads.

    Only a few results are computed ahead. Raises the exception of the first item that fails.
    """
    pool, step = _get_pool(os.getpid()), 8 * MAX_THREADS
    for start in range(0, len(items), step):
        yield from pool.map(work, items[start : start + step])


def submit(work: Callable[[], R]) -> Future[R]:
    """Runs ``work`` in a thread, and returns a future with its result."""
    return _get_pool(os.getpid()).submit(work)
