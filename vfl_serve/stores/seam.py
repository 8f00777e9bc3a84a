"""Interfaces between a feature store and the databases and services that it queries."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from torch import Tensor

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.rpc.serving.stream import EMBEDDED, FAILED, UNKNOWN
from vfl_party.base.seeds import Rows

T = TypeVar("T")
R = TypeVar("R")

# Codes in place of a row number: the id is unknown, or its row cannot be used.
UNKNOWN_ROW, UNFIT_ROW = -1, -2


class ValueMismatchError(InputError):
    """Some of the ids or rows of a query are invalid, and the error does not name them.

    ``row``: the code for the invalid id, once it is queried alone.
    """

    def __init__(self, code: Code, text: str, row: int = UNFIT_ROW) -> None:
        super().__init__(code, text)
        self.row = row


class BrokenError(InputError):
    """A connection broke; another connection may work."""


@dataclass(frozen=True)
class LookupResult:
    """The features of N ids.

    Args:
        rows: int64 [N], the row number of each id, ``UNKNOWN_ROW`` or ``UNFIT_ROW``.
        inputs: Returns the encoder's arguments for row numbers, [B, …], on the party's device. For
            a model that takes cells (``vfl_party.phases.online.Cells``): the cells, on the CPU.
        version: A random name of the state of the features; it reveals nothing about them.
    """

    rows: Rows
    inputs: Callable[[Rows], tuple[Tensor, ...]]
    version: str

    def states(self) -> npt.NDArray[np.uint8]:
        """Returns uint8 [N]: ``EMBEDDED``, ``UNKNOWN`` or ``FAILED`` for each id."""
        unused = np.where(self.rows == UNFIT_ROW, FAILED, UNKNOWN)
        return np.where(self.rows >= 0, EMBEDDED, unused).astype(np.uint8)


@dataclass(frozen=True)
class IdBatch:
    """Rows that a source has returned.

    Args:
        rows: A table with the id columns and the columns of training.
        as_written: See ``vfl_party.data.stream.RowStream``.
    """

    rows: pa.Table
    as_written: bool


class Source(Protocol):
    """Returns rows by id. Any thread may call it."""

    @property
    def settings(self) -> DataSettings:
        """Returns the settings for reading rows."""
        ...

    def check(self) -> None:
        """Sends a test query without ids. Raises InputError if a column of training is missing."""
        ...

    def rows(self, ids: Sequence[str], until_s: float) -> IdBatch:
        """Returns the rows of distinct ids, in any order; unknown ids have no row.

        Raises TimeoutError at ``until_s`` (monotonic), ValueMismatchError if some ids are invalid,
        and InputError if the query fails.
        """
        ...

    def close(self) -> None: ...


def split_until_fit(
    items: Sequence[T], work: Callable[[Sequence[T]], R]
) -> Iterator[tuple[Sequence[T], R | ValueMismatchError]]:
    """Yields parts of ``items`` with the result of ``work`` for them.

    If ``work`` raises ValueMismatchError, the items are halved and tried again. A single invalid
    item is yielded with its error.
    """
    if not items:
        return
    try:
        yield items, work(items)
    except ValueMismatchError as error:
        if len(items) == 1:
            yield items, error
            return
        middle = len(items) // 2
        for half in (items[:middle], items[middle:]):
            yield from split_until_fit(half, work)


# Seconds after each interrupt.
_PAUSES_S = (0.05, 0.2, 1.0)


C = TypeVar("C")


@dataclass(eq=False)
class _Use(Generic[C]):
    """A use of a connection. ``connection``: None if it is not open. ``over``: set at the end."""

    connection: C | None
    until_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)


class ConnectionPool(Generic[C]):
    """Keeps connections open, and replaces broken connections.

    Args:
        open_: Opens a connection. Raises InputError.
        close: Closes a connection.
        size: The maximum number of open connections.
        interrupt: Interrupts the work on a connection, from another thread.
    """

    def __init__(
        self,
        open_: Callable[[], C],
        close: Callable[[C], None],
        size: int,
        interrupt: Callable[[C], None] = lambda _: None,
    ) -> None:
        self._open, self._close, self._interrupt = open_, close, interrupt
        # The unused connections (None before they open). The last used comes first.
        self._free: queue.LifoQueue[C | None] = queue.LifoQueue()
        for _ in range(size):
            self._free.put(None)
        self._closed = threading.Event()

    def run(self, work: Callable[[C], T], until_s: float) -> T:
        """Returns the result of ``work``, which runs again if an old connection has broken.

        Raises TimeoutError at ``until_s`` (monotonic) even if the other end does not answer,
        because ``work`` runs in a separate thread. Raises what ``opened`` and ``work`` raise.
        """
        left_s = until_s - time.monotonic()
        try:
            if left_s <= 0.0:
                raise TimeoutError
            connection = self._free.get(timeout=left_s)
        except queue.Empty:
            raise TimeoutError from None
        answer: Future[T] = Future()
        use: _Use[C] = _Use(connection, until_s)
        threading.Thread(
            target=self._work, args=(use, work, answer), name="lookup", daemon=True
        ).start()
        try:
            return answer.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            if not answer.done():
                # The interrupt may block too, so it runs in a separate thread.
                threading.Thread(target=self._stop, args=(use,), daemon=True).start()
            raise TimeoutError from None

    def close(self) -> None:
        """Closes the unused connections now, and the others after their use."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._close_quietly(self._free.get_nowait())

    def _work(self, use: _Use[C], work: Callable[[C], T], answer: Future[T]) -> None:
        try:
            answer.set_result(self._run(use, work))
        except BaseException as error:  # noqa: BLE001 - the caller gets the error
            answer.set_exception(error)
        finally:
            use.over.set()
            # After this, ``_stop`` does not interrupt the connection.
            with use.lock:
                left, use.connection = use.connection, None
            self._free.put(left)
            if self._closed.is_set():
                self.close()

    def _run(self, use: _Use[C], work: Callable[[C], T]) -> T:
        if use.connection is not None:
            try:
                return self._run_on(use, work)
            except BrokenError:
                # The other end may have closed an unused connection, so try a new one.
                if time.monotonic() >= use.until_s:
                    raise
        use.connection = self._open()
        # The caller has gone; the new connection stays for the next caller.
        if time.monotonic() >= use.until_s:
            raise TimeoutError
        return self._run_on(use, work)

    def _run_on(self, use: _Use[C], work: Callable[[C], T]) -> T:
        assert use.connection is not None  # noqa: S101 - opened before
        try:
            return work(use.connection)
        except ValueMismatchError:
            # The connection still works for other ids.
            raise
        except BaseException:
            with use.lock:
                broken, use.connection = use.connection, None
            self._close_quietly(broken)
            raise

    def _stop(self, use: _Use[C]) -> None:
        """Interrupts the work, and repeats this if the work has not ended."""
        for pause_s in _PAUSES_S:
            with use.lock, contextlib.suppress(Exception):
                if use.connection is not None:
                    self._interrupt(use.connection)
            if use.over.wait(pause_s):
                return

    def _close_quietly(self, connection: C | None) -> None:
        with contextlib.suppress(Exception):
            if connection is not None:
                self._close(connection)
