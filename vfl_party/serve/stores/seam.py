"""What a feature store gives for ids, and what it asks a database or a service."""

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
from vfl_common.rpc.serving.answered import EMBEDDED, FAILED, UNKNOWN
from vfl_party.base.seeds import Rows

T = TypeVar("T")
R = TypeVar("R")

# In place of a row's number: nobody knows the id, or what is known of it cannot be used.
UNKNOWN_ROW, UNFIT_ROW = -1, -2


class ValueMismatchError(InputError):
    """Some of the ids, or rows, cannot be answered, and are not named: alone they would be.

    ``row``: what stands in place of the row of one that is alone.
    """

    def __init__(self, code: Code, text: str, row: int = UNFIT_ROW) -> None:
        super().__init__(code, text)
        self.row = row


class BrokenError(InputError):
    """A connection broke; another one may do."""


@dataclass(frozen=True)
class LookupResult:
    """What a store has of N ids.

    Args:
        rows: the number of each id's row, ``UNKNOWN_ROW`` or ``UNFIT_ROW``, [N].
        inputs: gives the encoder's arguments for numbers of rows, [B, …], on the party's device;
            of a model that takes them, the cells (``vfl_party.phases.online.Cells``), on the CPU.
        version: names the state of the features; it says nothing of what is in them.
    """

    rows: Rows
    inputs: Callable[[Rows], tuple[Tensor, ...]]
    version: str

    def states(self) -> npt.NDArray[np.uint8]:
        """Returns of each id ``EMBEDDED``, ``UNKNOWN`` or ``FAILED``, [N], for the party itself."""
        unused = np.where(self.rows == UNFIT_ROW, FAILED, UNKNOWN)
        return np.where(self.rows >= 0, EMBEDDED, unused).astype(np.uint8)


@dataclass(frozen=True)
class IdBatch:
    """Rows as a source gives them.

    Args:
        rows: with the columns of the id and of training, by their names.
        as_written: see ``vfl_party.data.stream.RowStream``.
    """

    rows: pa.Table
    as_written: bool


class Source(Protocol):
    """Is asked for rows by id; any thread may ask."""

    @property
    def settings(self) -> DataSettings:
        """How its rows are read."""
        ...

    def check(self) -> None:
        """Asks for nobody. Raises InputError if it cannot be asked for the columns of training."""
        ...

    def rows(self, ids: Sequence[str], until_s: float) -> IdBatch:
        """Returns the rows of ids that are all different, in any order, without the unknown ones.

        Raises TimeoutError if there are none at ``until_s`` (monotonic), UnfitError if some of the
        ids cannot be asked for, and InputError if none can.
        """
        ...

    def close(self) -> None: ...


def split_until_fit(
    items: Sequence[T], work: Callable[[Sequence[T]], R]
) -> Iterator[tuple[Sequence[T], R | ValueMismatchError]]:
    """Yields all items with what ``work`` returns for them; if some of them do not fit, halves of
    them, and so on. One that is alone and does not fit comes with its error.
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
