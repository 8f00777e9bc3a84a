"""Encoder inputs of all rows, and the codes of categories in them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vfl_party.base.devices import index_on
from vfl_party.base.dtypes import real
from vfl_party.base.workers import submit
from vfl_party.data.inputs.made import BatchLog, BatchOrigin
from vfl_party.data.inputs.scaled import ScaledPixels
from vfl_party.data.row_arrays import MappedArray, Space, parts, release, rows_at_once
from vfl_party.models import InputSpec

# Codes: a category not seen in training; no category; one that augmentation hides; the first
# category.
UNKNOWN, MISSING, HIDDEN, RESERVED = 0, 1, 2, 3

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]


Inputs: TypeAlias = tuple[torch.Tensor, ...]


class ColumnPlace(NamedTuple):
    """The position of a table's column in an encoder's inputs: in the numbers, or in the
    categories.
    """

    numbers: slice = slice(0, 0)
    categories: slice = slice(0, 0)


NO_PLACES: Mapping[str, ColumnPlace] = MappingProxyType({})


class Ahead:
    """Reads up to two batches in a thread before they are needed."""

    def __init__(self) -> None:
        self._coming: deque[tuple[Codes, Future[Inputs]]] = deque(maxlen=2)

    def begin(self, rows: Codes, read: Callable[[Codes], Inputs]) -> None:
        """Starts to read a batch in a thread."""
        self._coming.append((rows, submit(partial(read, rows))))

    def take(self, rows: Codes) -> Inputs | None:
        """Returns a batch that was read ahead; None if these rows were not."""
        for place, (coming, batch) in enumerate(self._coming):
            if np.array_equal(coming, rows):
                del self._coming[place]
                return batch.result()
        return None


@dataclass(frozen=True, eq=False)
class Features:
    """Encoder inputs of all rows, on one device; large ones in a mapped file.

    Args:
        numbers: float32 [N, F] or [N, C, H, W], or images that are scaled on demand.
        categories: int64 [N, K] codes below ``cardinalities``, or None. Code 0 is a category not
            seen in training, 1 a missing one, 2 one hidden by augmentation (self-supervised methods
            only).
        arrays: the same as NumPy arrays, on the CPU and without scaled images.
        columns: {column of the table: its position}; empty for images.
        noted: remembers how each batch was made, if the party has several processes.
    """

    numbers: torch.Tensor | ScaledPixels
    categories: torch.Tensor | None = None
    cardinalities: tuple[int, ...] = ()
    arrays: tuple[npt.NDArray[Any], ...] = ()
    columns: Mapping[str, ColumnPlace] = field(default_factory=lambda: NO_PLACES)
    noted: BatchLog | None = field(default=None, repr=False)
    _ahead: Ahead = field(default_factory=Ahead, init=False, repr=False)

    @classmethod
    def of(
        cls,
        x: Floats,
        categories: Codes | None = None,
        cardinalities: tuple[int, ...] = (),
        columns: Mapping[str, ColumnPlace] = NO_PLACES,
    ) -> Features:
        """Returns the encoder inputs in arrays, which are not copied."""
        codes = None if categories is None else torch.from_numpy(categories)
        arrays = (x,) if categories is None else (x, categories)
        return cls(torch.from_numpy(x), codes, cardinalities, arrays, columns)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def spec(self) -> InputSpec:
        """Shape and cardinalities of the inputs of a row."""
        return InputSpec(tuple(self.numbers.shape[1:]), self.cardinalities)

    @property
    def x(self) -> torch.Tensor:
        """The numbers of all rows in memory, float32 [N, F] or [N, C, H, W]; images are scaled on
        each call.
        """
        return self.part(slice(None))

    def part(self, rows: slice) -> torch.Tensor:
        """Returns the numbers of neighbouring rows, [B, F] or [B, C, H, W]."""
        numbers = self.numbers
        block = numbers.rows(rows) if isinstance(numbers, ScaledPixels) else numbers[rows]
        return block.to(real())

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yields the numbers of all rows in blocks, [B, F] or [B, C, H, W]."""
        for part in parts(len(self), rows_at_once(4 * math.prod(self.numbers.shape[1:]))):
            yield self.part(part)

    def cells(self, rows_BF: torch.Tensor) -> torch.Tensor:
        """Returns for each column the number in a separate row, [B, F]; rows_BF: int64 [B, F]."""
        numbers = self.numbers
        cells = (
            numbers.cells(rows_BF)
            if isinstance(numbers, ScaledPixels)
            else numbers.gather(0, rows_BF)
        )
        return cells.to(real())

    def inputs(self, rows: torch.Tensor | npt.NDArray[np.int64]) -> Inputs:
        """Returns the encoder's arguments for a batch: ``x`` [B, …], and ``categories`` [B, K] if
        there are any.
        """
        x, *categories = self._inputs(rows)
        batch = (x.to(real()), *categories)
        if self.noted is not None:
            self.noted.note(batch, BatchOrigin(np.asarray(rows)))
        return batch

    def _inputs(self, rows: torch.Tensor | npt.NDArray[np.int64]) -> Inputs:
        if self._reads:
            wanted = np.asarray(rows)
            batch = self._ahead.take(wanted)
            return self._read(wanted) if batch is None else batch
        if isinstance(self.numbers, ScaledPixels):
            return (self.numbers.rows(np.asarray(rows)),)
        index = index_on(torch.as_tensor(rows), self.numbers.device)
        x_B = self.numbers.index_select(0, index)
        return (x_B,) if self.categories is None else (x_B, self.categories.index_select(0, index))

    def expect(self, rows: npt.NDArray[np.int64]) -> None:
        """Starts to read rows that ``inputs`` needs soon, if reading takes time. Other rows may be
        requested instead.
        """
        if self._reads:
            self._ahead.begin(rows, self._read)

    def expecting(self, batches: Sequence[Codes]) -> Iterator[Codes]:
        """Yields batches of rows, and reads the next one meanwhile."""
        for number, batch in enumerate(batches, 1):
            if number < len(batches):
                self.expect(batches[number])
            yield batch

    def _read(self, rows: Codes) -> Inputs:
        if isinstance(self.numbers, ScaledPixels):
            return (self.numbers.rows(rows),)
        arrays = (
            array.rows(rows) if isinstance(array, MappedArray) else array[rows]
            for array in self.arrays
        )
        return tuple(map(torch.from_numpy, arrays))

    @cached_property
    def _reads(self) -> bool:
        """Whether a batch is read from a file, or scaled, on demand."""
        if isinstance(self.numbers, ScaledPixels):
            return self.numbers.reads
        return any(isinstance(array, MappedArray) for array in self.arrays)

    def concat(self, other: Features, space: Space) -> Features:
        """Returns these rows, then the rows of ``other``, which must have the same preprocessing.
        Raises InputError.
        """
        ours, theirs = self.numbers, other.numbers
        if (
            isinstance(ours, ScaledPixels)
            and isinstance(theirs, ScaledPixels)
            and ours.pixels.dtype == theirs.pixels.dtype
        ):
            return Features(ours.with_pixels(space.concatenate([ours.pixels, theirs.pixels])))
        x, *categories = (
            space.concatenate(pair)
            for pair in zip(self._as_floats(space), other._as_floats(space), strict=True)
        )
        codes = categories[0] if categories else None
        return Features.of(x, codes, self.cardinalities, self.columns)

    def _as_floats(self, space: Space) -> tuple[npt.NDArray[Any], ...]:
        if not isinstance(self.numbers, ScaledPixels):
            return self.arrays
        x, end = space.empty(self.numbers.shape, np.float32), 0
        for block in self.blocks():
            x[end : end + len(block)] = block.numpy()
            end += len(block)
            release(x)
        return (x,)

    def to(self, device: torch.device | str) -> Features:
        """Returns the same rows on a device."""
        if torch.device(device) == self.numbers.device:
            return self
        categories = None if self.categories is None else self.categories.to(device)
        numbers, columns = self.numbers.to(device), self.columns
        return Features(numbers, categories, self.cardinalities, columns=columns, noted=self.noted)

    def with_column_of(self, rows: Codes, others: Codes, column: str | None) -> Inputs:
        """Returns the encoder's arguments for ``rows``, with one column taken from the rows
        ``others``, row by row.

        Args:
            rows: int64 [B].
            others: int64 [B].
            column: its name; None for all columns.
        """
        theirs = self.inputs(others)
        if column is None:
            return theirs
        place = self.columns[column]
        mixed = [tensor.clone() for tensor in self.inputs(rows)]
        for mine, their, at in zip(mixed, theirs, place, strict=False):
            mine[:, at] = their[:, at]
        if self.noted is not None:
            self.noted.note(mixed, BatchOrigin(rows, others, column))
        return tuple(mixed)
