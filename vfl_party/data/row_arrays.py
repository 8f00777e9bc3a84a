"""Stores arrays of rows: in memory if they are small, else in unnamed files, which disappear with
the process.

The files are memory-mapped. Mapped pages count as memory of this process, so ``release`` unmaps the
pages that were read.
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

# The maximum number of rows, and of their bytes, that are processed at once.
PART, PART_BYTES = 1 << 14, 1 << 26
# The number of rows that are compared at once.
_LOOKED_AT = 1 << 20
# The maximum number of files that are open while rows are sorted.
MAX_PIECES = 64
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Space:
    """The place where a party's arrays are stored.

    Args:
        folder: The folder of the unnamed files.
        max_bytes: The maximum size of an array in memory. Larger arrays are stored in files.
    """

    folder: str
    max_bytes: int

    @classmethod
    def of(cls, settings: DataSettings) -> Space:
        """Returns the space of the settings, by default in the system's temporary folder."""
        return cls(settings.scratch or tempfile.gettempdir(), settings.memory_mib << 20)

    def share(self) -> Space:
        """Returns a space with a quarter of the memory, for arrays with one value per row, such as
        ids, because several copies of them exist at the same time.
        """
        return replace(self, max_bytes=self.max_bytes // 4)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Returns an uninitialized array. Raises InputError if the disk is full."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if size <= self.max_bytes:
            return np.empty(shape, dtype)
        with self._open_file(size) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise self._make_error(size, error) from None
            return MappedArray.of(file, dtype, shape)

    def take(self, values: Array, rows: npt.NDArray[np.int64]) -> Array:
        """Returns ``values[rows]`` for distinct rows, int64 [R]. Raises InputError if the disk is
        full.
        """
        if getattr(values, "_mmap", None) is None:
            return values[rows]
        result = self.empty((len(rows), *values.shape[1:]), values.dtype)
        for start, piece in self._take_in_pieces(values, rows):
            result[start : start + len(piece)] = piece
            release(result)
        return result

    def _take_in_pieces(
        self, values: Array, rows: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, Array]]:
        """Yields ``values[rows]`` in pieces: the position of the first row, and the rows.

        Reading a mapped file row by row is slow. So the file is read in order, each row is appended
        to the file of its piece, and each piece is then sorted in memory.
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
            # The memory is freed before the next piece is read.
            del block, sorted_

    def concatenate(self, arrays: Sequence[Array]) -> Array:
        """Returns arrays concatenated by rows. Raises InputError if the disk is full."""
        result = self.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), arrays[0].dtype)
        end = 0
        for values in arrays:
            for part in parts_of(values):
                block = values[part]
                result[end : end + len(block)] = block
                end += len(block)
                release(values, result)
        return result

    def store(self, values: Array, dtype: npt.DTypeLike | None = None) -> Array:
        """Copies an array into this space, converted to ``dtype`` if it is given. Returns
        ``values`` itself if it is already there.

        Raises InputError if the disk is full.
        """
        has_dtype = dtype is None or values.dtype == dtype
        if has_dtype and isinstance(values, MappedArray) and values.descriptor is not None:
            return values
        result = self.empty(values.shape, values.dtype if dtype is None else dtype)
        for part in parts_of(values):
            result[part] = values[part]
            release(values, result)
        return result

    def _append(self, file: IO[bytes], rows: Array) -> None:
        """Writes rows to the end of a file. Raises InputError if the disk is full."""
        try:
            unwritten = np.ascontiguousarray(rows).data.cast("B") if rows.size else memoryview(b"")
            # The file is unbuffered, because closing a buffered file would retry a failed write.
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
        except OSError as error:
            raise self._make_error(rows.nbytes, error) from None

    def growing(self, row: int | tuple[int, ...], dtype: npt.DTypeLike) -> GrowingMatrix:
        """Returns an array that grows by blocks of rows. ``row``: the shape or width of a row."""
        return GrowingMatrix(self, (row,) if isinstance(row, int) else row, np.dtype(dtype))

    def _open_file(self, size: int) -> IO[bytes]:
        try:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(dir=self.folder, prefix="vfl-", buffering=0)
        except OSError as error:
            raise self._make_error(size, error) from None

    def _make_error(self, size: int, error: OSError) -> InputError:
        if not is_full(error):
            return InputError(
                Code.FILE_INVALID,
                f"{self.folder}: cannot hold the table's rows ({error.strerror}). Set "
                "data.scratch to another folder.",
            )
        mib = math.ceil(size / 2**20)
        return InputError(
            Code.FILE_INVALID,
            f"{self.folder}: cannot store {mib:,} MiB of the table's rows ({error.strerror}). "
            "Free disk space, or set data.scratch to a folder on another disk.",
        )


IN_MEMORY = Space("", 1 << 62)


class MappedArray(np.memmap[Any, Any]):
    """An array in an unnamed file. ``descriptor``: The descriptor of the file; None for a slice of
    an array.
    """

    descriptor: int | None = None

    @classmethod
    def of(cls, file: IO[bytes], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> MappedArray:
        """Maps a file of the array's size. The file may be closed afterwards."""
        array = cls(file, dtype, "r+", shape=shape)
        array.descriptor = os.dup(file.fileno())
        weakref.finalize(array, os.close, array.descriptor)
        return array

    def rows(self, rows: npt.NDArray[np.int64]) -> Array:
        """Reads the given rows, int64 [B], from the file without mapping pages.

        Otherwise the kernel maps up to 2 MiB around each row, so a few batches would map the whole
        file.
        """
        if self.descriptor is None or not len(self):
            return np.asarray(self[rows])
        size, place = self[:1].nbytes, self.descriptor
        data = bytearray().join(
            [os.pread(place, size, offset) for offset in (rows * size).tolist()]
        )
        return np.frombuffer(data, self.dtype).reshape(len(rows), *self.shape[1:])


class GrowingMatrix:
    """An array that grows by blocks of rows: in memory at first, in a file once it is too large."""

    def __init__(self, space: Space, row: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._space, self._row, self._dtype = space, row, dtype
        self._blocks: list[Array] = []
        self._open_file: IO[bytes] | None = None
        self._rows = 0

    def append(self, block_N: Array) -> None:
        """Adds rows, [B, …]. Raises InputError if the disk is full."""
        self._rows += len(block_N)
        self._blocks.append(block_N)
        if self._open_file is not None or self._size > self._space.max_bytes:
            self._write()

    def finish(self) -> Array:
        """Returns all rows, [N, …]. Raises InputError if the disk is full."""
        if self._open_file is None:
            empty = np.empty((0, *self._row), self._dtype)
            return np.concatenate(self._blocks) if self._blocks else empty
        with self._open_file as file:
            return MappedArray.of(file, self._dtype, (self._rows, *self._row))

    @property
    def _size(self) -> int:
        return self._rows * math.prod(self._row) * self._dtype.itemsize

    def _write(self) -> None:
        if self._open_file is None:
            self._open_file = self._space._open_file(self._size)
            weakref.finalize(self, self._open_file.close)
        try:
            for block_N in self._blocks:
                self._space._append(self._open_file, block_N)
        except InputError:
            self._open_file.close()
            raise
        self._blocks.clear()


def places_of(rows: npt.NDArray[np.integer[Any]], n: int) -> npt.NDArray[np.integer[Any]]:
    """Returns the position of each of ``n`` rows in ``rows``, which must be distinct. Rows that are
    not in ``rows`` get a number larger than all positions.
    """
    dtype: Any = np.uint32 if n < 1 << 32 else np.int64
    places_N: npt.NDArray[np.integer[Any]] = np.full(n, np.iinfo(dtype).max, dtype)
    for part in parts(len(rows)):
        places_N[rows[part]] = np.arange(part.start, min(part.stop, len(rows)), dtype=dtype)
        release(rows)
    return places_N


def size_of_piece(space: Space, row_bytes: int, rows: int) -> int:
    """Returns the number of rows to sort in memory at once, of ``rows`` rows."""
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
    """Yields slices of ``range(n)`` with ``size`` rows each, by default ``PART``, to limit
    memory.
    """
    step = size if size is not None else PART
    return (slice(start, start + step) for start in range(0, n, step))


def parts_of(values: Array) -> Iterator[slice]:
    """Yields slices of the rows of ``values``, of at most ``PART`` rows and ``PART_BYTES`` bytes
    each.
    """
    return parts(len(values), rows_at_once(values[:1].nbytes))


def rows_at_once(row_bytes: int) -> int:
    """Returns the number of rows to process at once, if a row has ``row_bytes`` bytes."""
    return max(1, min(PART, PART_BYTES // max(1, row_bytes)))


def some_rows(values: Array, rows: npt.NDArray[np.int64] | slice) -> Array:
    """Returns a copy of the given rows. Rows of a mapped file are read without mapping pages."""
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
