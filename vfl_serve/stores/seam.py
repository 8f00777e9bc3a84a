"""Interfaces between a feature store and the databases and services that it queries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

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
