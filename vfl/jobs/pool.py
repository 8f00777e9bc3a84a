"""Chooses the processes that carry out orders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

from vfl.jobs.answers import Order
from vfl.jobs.workers import JobWorkers


class WorkerPool(Protocol):
    """Processes that carry out orders."""

    def run(self, order: Order) -> None:
        """Has an order carried out and waits for its end; several threads may call it. Raises
        VflError.
        """

    def close(self) -> None:
        """Ends what is not finished, as far as the processes allow it."""


class _Pools(WorkerPool, AbstractContextManager["_Pools"], Protocol): ...


def pool(does: str, jobs: int, threads: int, backend: str | None = None) -> _Pools:
    """Returns the processes for a block.

    Args:
        does: ``module:function``, which carries out an order.
        jobs: the number of orders at a time.
        threads: for torch and its libraries in each of our own processes.
        backend: the name of a backend of joblib, such as ``loky`` or ``dask``; None: our own
            processes, on this machine.

    Raises InputError if joblib has no such backend, OSError if processes cannot be started.
    """
    if backend is None:
        return JobWorkers(does, jobs, threads)
    # Imported late: it imports joblib.
    from vfl.jobs.elsewhere import Elsewhere

    return Elsewhere(does, jobs, backend)


@contextlib.contextmanager
def waiting(workers: WorkerPool, jobs: int) -> Iterator[ThreadPoolExecutor]:
    """Yields ``jobs`` threads for a block, to wait for orders. If the block raises, also by Ctrl-C,
    unfinished orders are ended.
    """
    threads = ThreadPoolExecutor(jobs)
    try:
        yield threads
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        workers.close()
        raise
    finally:
        # All orders are finished, or their processes are gone.
        threads.shutdown()
