"""Holds the encoder inputs of all rows, and defines the codes of categories."""

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

from vfl_party.base.devices import copy_index, get_real_dtype, submit
from vfl_party.data.inputs.made import BatchLog, BatchOrigin
from vfl_party.data.inputs.scaled import ScaledPixels
from vfl_party.data.row_arrays import MappedArray, Space, parts, release, rows_at_once
from vfl_party.models import InputSpec

# Codes of a category that training did not have, of a missing category, of a category that
# augmentation hides, and of the first category.
UNKNOWN, MISSING, HIDDEN, RESERVED = 0, 1, 2, 3

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]


Inputs: TypeAlias = tuple[torch.Tensor, ...]


class ColumnPlace(NamedTuple):
    """The position of a table's column in the encoder inputs, either in the numbers or in the
    categories.
    """

    numbers: slice = slice(0, 0)
    categories: slice = slice(0, 0)


NO_PLACES: Mapping[str, ColumnPlace] = MappingProxyType({})


class Ahead:
    """Reads up to two batches ahead in a thread."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Codes, Future[Inputs]]] = deque(maxlen=2)

    def begin(self, rows: Codes, read: Callable[[Codes], Inputs]) -> None:
        """Starts to read a batch in a thread."""
        self._pending.append((rows, submit(partial(read, rows))))

    def take(self, rows: Codes) -> Inputs | None:
        """Returns a batch that was read ahead; None if these rows were not read ahead."""
        for position, (pending_rows, batch) in enumerate(self._pending):
            if np.array_equal(pending_rows, rows):
                del self._pending[position]
                return batch.result()
        return None


@dataclass(frozen=True, eq=False)
class Features:
    """The encoder inputs of all rows, on one device. Large inputs are in a mapped file.

    Args:
        numbers: The numbers, float32 [N, F] or [N, C, H, W], or images that are scaled on demand.
        categories: The codes of categories, int64 [N, K]; None without categories. Code 0 is a
            category that training did not have, 1 a missing category, 2 a category hidden by
            augmentation (only in self-supervised methods).
        cardinalities: The number of codes of each categorical column.
        arrays: ``numbers`` and ``categories`` as NumPy arrays on the CPU; empty for images that are
            scaled on demand.
        columns: The position of each column of the table; empty for images.
        noted: Records how each batch was made, if the party has several processes.
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
        """Creates the encoder inputs from arrays, which are not copied."""
        codes = None if categories is None else torch.from_numpy(categories)
        arrays = (x,) if categories is None else (x, categories)
        return cls(torch.from_numpy(x), codes, cardinalities, arrays, columns)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def spec(self) -> InputSpec:
        """The shape and the cardinalities of the inputs of a row."""
        return InputSpec(tuple(self.numbers.shape[1:]), self.cardinalities)

    @property
    def x(self) -> torch.Tensor:
        """The numbers of all rows in memory, float32 [N, F] or [N, C, H, W]. Images are scaled at
        each access.
        """
        return self.part(slice(None))

    def part(self, rows: slice) -> torch.Tensor:
        """Returns the numbers of consecutive rows, [B, F] or [B, C, H, W]."""
        numbers = self.numbers
        block = numbers.rows(rows) if isinstance(numbers, ScaledPixels) else numbers[rows]
        return block.to(get_real_dtype())

    def blocks(self) -> Iterator[torch.Tensor]:
        """Yields the numbers of all rows in blocks, [B, F] or [B, C, H, W]."""
        for part in parts(len(self), rows_at_once(4 * math.prod(self.numbers.shape[1:]))):
            yield self.part(part)

    def cells(self, rows_BF: torch.Tensor) -> torch.Tensor:
        """Returns the number of each column in a separate row, [B, F]. ``rows_BF``: The rows, int64
        [B, F].
        """
        numbers = self.numbers
        cells = (
            numbers.cells(rows_BF)
            if isinstance(numbers, ScaledPixels)
            else numbers.gather(0, rows_BF)
        )
        return cells.to(get_real_dtype())

    def inputs(self, rows: torch.Tensor | npt.NDArray[np.int64]) -> Inputs:
        """Returns the encoder's arguments for a batch: ``x`` [B, …] and, if the table has
        categories, ``categories`` [B, K].
        """
        x, *categories = self._take_inputs(rows)
        batch = (x.to(get_real_dtype()), *categories)
        if self.noted is not None:
            self.noted.note(batch, BatchOrigin(np.asarray(rows)))
        return batch

    def _take_inputs(self, rows: torch.Tensor | npt.NDArray[np.int64]) -> Inputs:
        if self._is_slow:
            row_numbers = np.asarray(rows)
            batch = self._ahead.take(row_numbers)
            return self._read_rows(row_numbers) if batch is None else batch
        if isinstance(self.numbers, ScaledPixels):
            return (self.numbers.rows(np.asarray(rows)),)
        index = copy_index(torch.as_tensor(rows), self.numbers.device)
        x_B = self.numbers.index_select(0, index)
        return (x_B,) if self.categories is None else (x_B, self.categories.index_select(0, index))

    def expect(self, rows: npt.NDArray[np.int64]) -> None:
        """Starts to read a batch of rows ahead, if reading takes time. The next call of ``inputs``
        may still be for other rows.
        """
        if self._is_slow:
            self._ahead.begin(rows, self._read_rows)

    def expecting(self, batches: Sequence[Codes]) -> Iterator[Codes]:
        """Yields batches of rows, and reads the next batch ahead."""
        for number, batch in enumerate(batches, 1):
            if number < len(batches):
                self.expect(batches[number])
            yield batch

    def _read_rows(self, rows: Codes) -> Inputs:
        if isinstance(self.numbers, ScaledPixels):
            return (self.numbers.rows(rows),)
        arrays = (
            array.rows(rows) if isinstance(array, MappedArray) else array[rows]
            for array in self.arrays
        )
        return tuple(map(torch.from_numpy, arrays))

    @cached_property
    def _is_slow(self) -> bool:
        """Whether batches are read from a file or scaled on demand, which takes time."""
        if isinstance(self.numbers, ScaledPixels):
            return self.numbers.reads
        return any(isinstance(array, MappedArray) for array in self.arrays)

    def concat(self, other: Features, space: Space) -> Features:
        """Returns these rows followed by the rows of ``other``, which must have the same
        preprocessing. Raises InputError.
        """
        own_numbers, other_numbers = self.numbers, other.numbers
        if (
            isinstance(own_numbers, ScaledPixels)
            and isinstance(other_numbers, ScaledPixels)
            and own_numbers.pixels.dtype == other_numbers.pixels.dtype
        ):
            return Features(
                own_numbers.with_pixels(
                    space.concatenate([own_numbers.pixels, other_numbers.pixels])
                )
            )
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
        """Returns the same rows on ``device``."""
        if torch.device(device) == self.numbers.device:
            return self
        categories = None if self.categories is None else self.categories.to(device)
        numbers, columns = self.numbers.to(device), self.columns
        return Features(numbers, categories, self.cardinalities, columns=columns, noted=self.noted)

    def with_column_of(self, rows: Codes, others: Codes, column: str | None) -> Inputs:
        """Returns the encoder's arguments for ``rows``, with the values of one column from the rows
        ``others``.

        Args:
            rows: The rows, int64 [B].
            others: For each of ``rows``, the row that gives the column's value, int64 [B].
            column: The name of the column; None for all columns.
        """
        other_inputs = self.inputs(others)
        if column is None:
            return other_inputs
        place = self.columns[column]
        mixed_inputs = [tensor.clone() for tensor in self.inputs(rows)]
        for own_input, other_input, columns in zip(mixed_inputs, other_inputs, place, strict=False):
            own_input[:, columns] = other_input[:, columns]
        if self.noted is not None:
            self.noted.note(mixed_inputs, BatchOrigin(rows, others, column))
        return tuple(mixed_inputs)
