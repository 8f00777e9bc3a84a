"""Starts the processes that carry out orders: workers of this package, or a joblib backend."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol, SupportsIndex

from vfl.jobs.answers import Order
from vfl.jobs.workers import JobWorkers
from vfl_common.errors import Code, InputError


class WorkerPool(Protocol):
    """Processes that carry out orders."""

    def run(self, order: Order) -> None:
        """Carries out an order in a process, and waits for its end. Several threads may call this
        method. Raises VflError.
        """

    def close(self) -> None:
        """Ends unfinished orders, as far as the backend supports it."""


class _WorkerPoolContext(WorkerPool, AbstractContextManager["_WorkerPoolContext"], Protocol): ...


def open_pool(does: str, jobs: int, threads: int, backend: str | None = None) -> _WorkerPoolContext:
    """Returns a pool of processes, as a context manager.

    Args:
        does: The function that carries out an order, as ``module:function``.
        jobs: The number of orders at the same time.
        threads: The number of threads of torch and its libraries in each worker of this package.
        backend: The name of a joblib backend, such as ``loky`` or ``dask``. None starts workers of
            this package, on this machine.

    Raises InputError if joblib has no such backend, and OSError if a process cannot be started.
    """
    if backend is None:
        return JobWorkers(does, jobs, threads)
    # This import is late because the module is needed only with a backend.
    from vfl.jobs.elsewhere import BackendPool

    return BackendPool(does, jobs, backend)


@contextlib.contextmanager
def open_waiting_threads(workers: WorkerPool, jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Yields an executor with ``jobs`` threads, which wait for orders. If the block raises an
    exception such as KeyboardInterrupt, unfinished orders are ended.
    """
    threads = ThreadPoolExecutor(jobs)
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        workers.close()
        raise
    finally:
        # Now all orders are finished, or their processes have ended.
        threads.shutdown()


def check_jobs(jobs: Any) -> int:
    """Returns the argument ``jobs`` as an integer. Raises InputError if it is not valid."""
    number = jobs if isinstance(jobs, SupportsIndex) and not isinstance(jobs, bool) else 0
    if operator.index(number) < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"jobs: must be an integer of at least 1 (got {jobs!r}). Give the number of runs at "
            "a time.",
        )
    return operator.index(number)
