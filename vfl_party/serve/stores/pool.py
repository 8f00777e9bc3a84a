"""Connections that several threads share, and work on them that ends in time."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from vfl_party.serve.stores.seam import BrokenError

C = TypeVar("C")
T = TypeVar("T")


class Pool(Generic[C]):
    """Keeps connections open, and opens new ones for those that broke.

    Args:
        opened: opens a connection. Raises InputError.
        close: closes one.
        most: how many are open at the same time.
        interrupt: ends the work on one, from another thread.
    """

    def __init__(
        self,
        opened: Callable[[], C],
        close: Callable[[C], None],
        most: int,
        interrupt: Callable[[C], None] = lambda _: None,
    ) -> None:
        self._opened, self._close, self._interrupt = opened, close, interrupt
        # Of each place: its connection, None before it is opened. The last used one comes first.
        self._free: queue.LifoQueue[C | None] = queue.LifoQueue()
        for _ in range(most):
            self._free.put(None)
        self._closed = threading.Event()

    def run(self, work: Callable[[C], T], until_s: float) -> T:
        """Returns what ``work`` returns. It may run twice, if a connection that was kept broke.

        Raises TimeoutError at ``until_s`` (monotonic), whatever the other end does: a thread of its
        own waits for it. Raises what ``opened`` and ``work`` raise.
        """
        left_s = until_s - time.monotonic()
        try:
            if left_s <= 0.0:
                raise TimeoutError
            kept = self._free.get(timeout=left_s)
        except queue.Empty:
            raise TimeoutError from None
        answer: Future[T] = Future()
        using: list[C] = []
        threading.Thread(
            target=self._use, args=(kept, work, answer, using), name="lookup", daemon=True
        ).start()
        try:
            return answer.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            if not answer.done():
                # The other end may not even answer this.
                threading.Thread(target=self._stop, args=(using,), daemon=True).start()
            raise TimeoutError from None

    def close(self) -> None:
        """Closes what is not in use; the rest as soon as it is not."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._end(self._free.get_nowait())

    def _use(
        self, kept: C | None, work: Callable[[C], T], answer: Future[T], using: list[C]
    ) -> None:
        left: C | None = None
        try:
            found, left = self._worked(kept, work, using)
        except BaseException as error:  # noqa: BLE001 - whoever waits hears of it
            answer.set_exception(error)
        else:
            answer.set_result(found)
        finally:
            using.clear()
            if self._closed.is_set():
                self._end(left)
                left = None
            self._free.put(left)

    def _worked(self, kept: C | None, work: Callable[[C], T], using: list[C]) -> tuple[T, C]:
        if kept is not None:
            with contextlib.suppress(BrokenError):
                return self._on(kept, work, using), kept
            # The other end may have closed it while nobody used it.
        new = self._opened()
        return self._on(new, work, using), new

    def _on(self, connection: C, work: Callable[[C], T], using: list[C]) -> T:
        using[:] = [connection]
        try:
            return work(connection)
        except BaseException:
            self._end(connection)
            raise

    def _stop(self, using: list[C]) -> None:
        with contextlib.suppress(Exception):
            for each in list(using):
                self._interrupt(each)

    def _end(self, connection: C | None) -> None:
        with contextlib.suppress(Exception):
            if connection is not None:
                self._close(connection)
