"""Arrays of rows: small ones in memory, large ones in unnamed files, which disappear with the
process.

The kernel drops pages of a mapped file when memory is short. They count as this process's memory
while they are mapped, so ``release`` unmaps what was read.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import is_full

# Maximum rows and bytes of rows that are processed at once.
PART, PART_BYTES = 1 << 14, 1 << 26
# Number of rows that are compared at once.
_LOOKED_AT = 1 << 20
# Maximum number of files while rows are sorted.
MAX_PIECES = 64
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Space:
    """Where a party's arrays are stored.

    Args:
        folder: of the unnamed files.
        max_bytes: larger arrays are stored in files.
    """

    folder: str
    max_bytes: int

    @classmethod
    def of(cls, settings: DataSettings) -> Space:
        """Returns the space of the settings, by default in the system's temporary folder."""
        return cls(settings.scratch or tempfile.gettempdir(), settings.memory_mib << 20)

    def share(self) -> Space:
        """Returns a space with a quarter of the memory, for arrays with one value a row, such as
        ids: several copies exist at a time.
        """
        return replace(self, max_bytes=self.max_bytes // 4)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Returns an uninitialized array. Raises InputError if the disk has no room for it."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if size <= self.max_bytes:
            return np.empty(shape, dtype)
        with self._file(size) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise self._full(size, error) from None
            return MappedArray.of(file, dtype, shape)

    def take(self, values: Array, rows: npt.NDArray[np.int64]) -> Array:
        """Returns ``values[rows]`` for distinct rows, int64 [R]. Raises InputError if the disk is
        full.
        """
        if getattr(values, "_mmap", None) is None:
            return values[rows]
        into = self.empty((len(rows), *values.shape[1:]), values.dtype)
        for start, piece in self._deal(values, rows):
            into[start : start + len(piece)] = piece
            release(into)
        return into

    def _deal(self, values: Array, rows: npt.NDArray[np.int64]) -> Iterator[tuple[int, Array]]:
        """Yields ``values[rows]`` in pieces: (position of the first row, rows).

        Reading a mapped file row by row is slow. So it is read from its beginning, each row is
        appended to the file of its piece, and each piece is sorted in memory.
        """
        size = size_of_piece(self, max(1, values[:1].nbytes), len(rows))
        places_N, files = places_of(rows, len(values)), replace(self, max_bytes=0)
        pieces = [
            (files.growing((), np.int64), files.growing(values.shape[1:], values.dtype))
            for _ in range(0, len(rows), size)
        ]
        for part in parts_of(values):
            places_B = places_N[part].astype(np.int64)
            piece_B = places_B // size
            order_B = np.argsort(piece_B, kind="stable")
            block, places_B = values[part][order_B], places_B[order_B]
            ends = np.searchsorted(piece_B[order_B], np.arange(len(pieces) + 1))
            for (places, cells), first, end in zip(pieces, ends[:-1], ends[1:], strict=True):
                places.append(places_B[first:end])
                cells.append(block[first:end])
            release(values)
        for number, (places, cells) in enumerate(pieces):
            block = np.asarray(cells.finish())
            sorted_ = np.empty_like(block)
            sorted_[places.finish() - number * size] = block
            yield number * size, sorted_
            # Freed before the next piece is read.
            del block, sorted_

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Returns arrays concatenated by rows. Raises InputError if the disk has no room for it."""
        into = self.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        end = 0
        for values in arrays:
            for part in parts_of(values):
                block = values[part]
                into[end : end + len(block)] = block
                end += len(block)
                release(values, into)
        return into

    def store(self, values: Array, dtype: npt.DTypeLike | None = None) -> Array:
        """Returns an array stored contiguously in this space, as ``dtype`` if it is given;
        ``values`` itself if it already is.

        Raises InputError if the disk is full.
        """
        same = dtype is None or values.dtype == dtype
        if same and isinstance(values, MappedArray) and values.descriptor is not None:
            return values
        into = self.empty(values.shape, values.dtype if dtype is None else dtype)
        for part in parts_of(values):
            into[part] = values[part]
            release(values, into)
        return into

    def _append(self, file: IO[bytes], rows: Array) -> None:
        """Writes rows to the end of a file. Raises InputError if the disk is full."""
        try:
            left = np.ascontiguousarray(rows).data.cast("B") if rows.size else memoryview(b"")
            # Unbuffered: a buffer is written again when the file is closed.
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            raise self._full(rows.nbytes, error) from None

    def growing(self, row: int | tuple[int, ...], dtype: npt.DTypeLike) -> GrowingMatrix:
        """Returns an array that grows by blocks of rows. ``row``: the shape or width of a row."""
        return GrowingMatrix(self, (row,) if isinstance(row, int) else row, np.dtype(dtype))

    def _file(self, size: int) -> IO[bytes]:
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(dir=self.folder, prefix="vfl-", buffering=0)
        except OSError as error:
            raise self._full(size, error) from None

    def _full(self, size: int, error: OSError) -> InputError:
        if not is_full(error):
            return InputError(
                Code.FILE_INVALID,
                f"{self.folder}: cannot hold the table's rows ({error.strerror}). Set "
                "data.scratch to another folder.",
            )
        mib = math.ceil(size / 2**20)
        return InputError(
            Code.FILE_INVALID,
            f"{self.folder}: has no room for {mib:,} MiB of the table's rows ({error.strerror}). "
            "Make room, or set data.scratch to a folder on another disk.",
        )


IN_MEMORY = Space("", 1 << 62)


class MappedArray(np.memmap[Any, Any]):
    """An array in an unnamed file. ``descriptor``: of the file; None for a part of an array."""

    descriptor: int | None = None

    @classmethod
    def of(cls, file: IO[bytes], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> MappedArray:
        """Maps a file of this size, which may be closed afterwards."""
        made = cls(file, dtype, "r+", shape=shape)
        made.descriptor = os.dup(file.fileno())
        weakref.finalize(made, os.close, made.descriptor)
        return made

    def rows(self, rows: npt.NDArray[np.int64]) -> Array:
        """Returns the given rows, int64 [B], read from the file without mapping pages.

        The kernel maps up to 2 MiB around each row that is read through memory, so a few batches
        map the whole file.
        """
        if self.descriptor is None or not len(self):
            return np.asarray(self[rows])
        size, place = self[:1].nbytes, self.descriptor
        data = bytearray().join(
            [os.pread(place, size, offset) for offset in (rows * size).tolist()]
        )
        return np.frombuffer(data, self.dtype).reshape(len(rows), *self.shape[1:])


class GrowingMatrix:
    """An array that grows by blocks of rows: in memory at first, in a file when it is too large."""

    def __init__(self, space: Space, row: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._space, self._row, self._dtype = space, row, dtype
        self._blocks: list[Array] = []
        self._file: IO[bytes] | None = None
        self._rows = 0

    def append(self, block_N: Array) -> None:
        """Adds rows, [B, …]. Raises InputError if the disk is full."""
        self._rows += len(block_N)
        self._blocks.append(block_N)
        if self._file is not None or self._size > self._space.max_bytes:
            self._write()

    def finish(self) -> Array:
        """Returns all rows, [N, …]. Raises InputError if the disk is full."""
        if self._file is None:
            empty = np.empty((0, *self._row), self._dtype)
            return np.concatenate(self._blocks) if self._blocks else empty
        with self._file as file:
            return MappedArray.of(file, self._dtype, (self._rows, *self._row))

    @property
    def _size(self) -> int:
        return self._rows * math.prod(self._row) * self._dtype.itemsize

    def _write(self) -> None:
        if self._file is None:
            self._file = self._space._file(self._size)
            weakref.finalize(self, self._file.close)
        try:
            for block_N in self._blocks:
                self._space._append(self._file, block_N)
        except InputError:
            self._file.close()
            raise
        self._blocks.clear()


def places_of(rows: npt.NDArray[np.integer[Any]], n: int) -> npt.NDArray[np.integer[Any]]:
    """Returns the position of each of ``n`` rows in ``rows``, which are distinct; for other rows a
    number beyond all positions.
    """
    dtype: Any = np.uint32 if n < 1 << 32 else np.int64
    places_N: npt.NDArray[np.integer[Any]] = np.full(n, np.iinfo(dtype).max, dtype)
    for part in parts(len(rows)):
        places_N[rows[part]] = np.arange(part.start, min(part.stop, len(rows)), dtype=dtype)
        release(rows)
    return places_N


def size_of_piece(space: Space, row_bytes: int, rows: int) -> int:
    """Returns how many of ``rows`` rows are sorted in memory at once."""
    return max(1, min(rows, max(space.max_bytes // (4 * row_bytes), rows // MAX_PIECES + 1)))


def is_ascending(rows: npt.NDArray[np.integer[Any]]) -> bool:
    """Returns whether rows are strictly ascending."""
    ascending = all(
        bool(
            (
                rows[start + 1 : start + 1 + _LOOKED_AT] > rows[start : len(rows) - 1][:_LOOKED_AT]
            ).all()
        )
        for start in range(0, len(rows), _LOOKED_AT)
    )
    release(rows)
    return ascending


def parts(n: int, size: int | None = None) -> Iterator[slice]:
    """Yields slices of ``range(n)``, of ``size`` or ``PART`` rows, to limit memory."""
    step = size if size is not None else PART
    return (slice(start, start + step) for start in range(0, n, step))


def parts_of(values: Array) -> Iterator[slice]:
    """Yields slices of the rows of ``values``, of at most ``PART`` rows and ``PART_BYTES`` bytes
    each.
    """
    return parts(len(values), rows_at_once(values[:1].nbytes))


def rows_at_once(row_bytes: int) -> int:
    """Returns how many rows of a size are processed at once."""
    return max(1, min(PART, PART_BYTES // max(1, row_bytes)))


def some_rows(values: Array, rows: npt.NDArray[np.int64] | slice) -> Array:
    """Returns a copy of the given rows; rows of a mapped file are read without mapping pages."""
    if isinstance(values, MappedArray) and not isinstance(rows, slice):
        return values.rows(rows)
    block = np.array(values[rows])
    release(values)
    return block


def release(*arrays: Array) -> None:
    """Unmaps the pages of mapped arrays, which stay usable."""
    for array in arrays:
        mapped = getattr(array, "_mmap", None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
