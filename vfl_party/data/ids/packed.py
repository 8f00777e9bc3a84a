"""Stores the texts of many rows: in memory if they are small, else in unnamed files.

The texts are one array of Arrow's large strings: the bytes of all texts, and the end of each text.
Files are memory-mapped, so that Arrow can use them. ``release_texts`` unmaps the pages that were
read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.row_arrays import (
    GrowingMatrix,
    MappedArray,
    Space,
    is_ascending,
    parts,
    places_of,
    release,
    size_of_piece,
)

Positions = npt.NDArray[np.int64]
# The number of rows that are processed at once.
CHUNK = 1 << 16
# The maximum number of rows that are read one by one from a file.
FEW = 1 << 12
# The bytes of memory per row while rows are sorted.
_ROW_BYTES = 64
# Mapped arrays by the address of their first byte.
_FILES: WeakValueDictionary[int, MappedArray] = WeakValueDictionary()


class GrowingTexts:
    """An array of texts that grows by blocks: in memory at first, in files once it is too large."""

    def __init__(self, space: Space) -> None:
        share = space.share()
        self._data, self._ends = share.growing((), np.uint8), share.growing((), np.int64)
        self._ends.append(np.zeros(1, np.int64))
        self._nulls: list[Positions] = []
        self._rows = self._bytes = 0

    def append(self, texts: pa.Array) -> None:
        """Adds texts, which may be null. Raises InputError if the disk is full."""
        offsets, data = offsets_and_bytes(pc.cast(texts, pa.large_string()))
        if texts.null_count:
            self._nulls.append(np.flatnonzero(texts.is_null().to_numpy(False)) + self._rows)
        self._ends.append(offsets[1:] + (self._bytes - offsets[0]))
        self._data.append(data[offsets[0] : offsets[-1]])
        self._rows += len(texts)
        self._bytes += int(offsets[-1] - offsets[0])

    def finish(self) -> pa.LargeStringArray:
        """Returns all texts. Raises InputError if the disk is full."""
        ends, data = _make_buffer(self._ends.finish()), _make_buffer(self._data.finish())
        if not self._nulls:
            return pa.LargeStringArray.from_buffers(self._rows, ends, data, None, 0)
        valid_N = np.ones(self._rows, bool)
        for rows in self._nulls:
            valid_N[rows] = False
        valid = pa.py_buffer(np.packbits(valid_N, bitorder="little"))
        return pa.LargeStringArray.from_buffers(self._rows, ends, data, valid)


class RowBuckets:
    """Distributes rows and their texts over files. Each file is later read as a whole.

    Args:
        space: The space of the files.
        count: The number of files.
    """

    def __init__(self, space: Space, count: int) -> None:
        files = replace(space, max_bytes=0)
        self._files: list[tuple[GrowingMatrix, GrowingTexts]] = [
            (files.growing((), np.int64), GrowingTexts(files)) for _ in range(count)
        ]

    def distribute(self, file_B: npt.NDArray[Any], rows_B: Positions, texts_B: pa.Array) -> None:
        """Adds each row to its file. Rows with a larger file number are left out. Raises InputError
        if the disk is full.

        Args:
            file_B: The number of each row's file, [B].
            rows_B: The rows, int64 [B].
            texts_B: The texts of the rows, [B].
        """
        order_B = np.argsort(file_B, kind="stable")
        ends = np.searchsorted(file_B[order_B], np.arange(len(self._files) + 1)).tolist()
        rows_B, texts_B = rows_B[order_B], texts_B.take(pa.array(order_B))
        for (rows, texts), start, end in zip(self._files, ends[:-1], ends[1:], strict=True):
            if end > start:
                rows.append(rows_B[start:end])
                texts.append(texts_B.slice(start, end - start))

    def __iter__(self) -> Iterator[tuple[Positions, pa.LargeStringArray]]:
        """Yields the rows and texts of each file, in the order in which they were added, and
        removes the file.
        """
        self._files.reverse()
        while self._files:
            rows, texts = self._files.pop()
            yield rows.finish(), texts.finish()


def texts_of(
    values: pa.Array, space: Space, change: Callable[[slice, pa.Array], pa.Array]
) -> pa.LargeStringArray:
    """Applies ``change(rows, texts)`` to all texts, part by part. Raises InputError if the disk is
    full.
    """
    result = GrowingTexts(space)
    for part in parts(len(values), CHUNK):
        result.append(change(part, values[part]))
        release_texts(values)
    return result.finish()


def take_texts(
    values: pa.LargeStringArray, rows: npt.NDArray[np.integer[Any]], space: Space
) -> pa.LargeStringArray:
    """Returns the texts of the given rows, in their order. Rows must be distinct if ``values`` are
    in files.

    Raises InputError if the disk is full.
    """
    if not in_files(values) or len(rows) <= FEW:
        taken = values.take(pa.array(rows))
        release_texts(values)
        return taken
    result = GrowingTexts(space)
    if is_ascending(rows):
        for part in parts(len(rows), CHUNK):
            result.append(values.take(pa.array(rows[part])))
            release_texts(values)
            release(rows)
        return result.finish()
    size = size_of_piece(space, _ROW_BYTES, len(rows))
    places_N, buckets = places_of(rows, len(values)), RowBuckets(space, -(-len(rows) // size))
    for part in parts(len(values), CHUNK):
        places_B = places_N[part].astype(np.int64)
        buckets.distribute(places_B // size, places_B, values[part])
        release_texts(values)
    for places, texts in buckets:
        result.append(texts.take(pa.array(np.argsort(places))))
    return result.finish()


def in_files(values: pa.Array) -> bool:
    """Returns whether texts are in files."""
    return next(_iterate_mapped(values), None) is not None


def release_texts(*texts: pa.Array) -> None:
    """Unmaps the pages of texts in files that were read. The texts stay usable."""
    for array in texts:
        release(*_iterate_mapped(array))


def _iterate_mapped(values: pa.Array) -> Iterator[MappedArray]:
    for buffer in values.buffers() if isinstance(values, pa.Array) else ():
        mapped = None if buffer is None else _FILES.get(buffer.address)
        if mapped is not None:
            yield mapped


def _make_buffer(array: npt.NDArray[Any]) -> pa.Buffer:
    buffer = pa.py_buffer(array)
    if isinstance(array, MappedArray):
        _FILES[buffer.address] = array
    return buffer


def offsets_and_bytes(
    texts: pa.LargeStringArray,
) -> tuple[Positions, npt.NDArray[np.uint8]]:
    """Returns the start of each text and the end of the last text, int64 [N + 1], and the bytes of
    all texts, uint8.
    """
    _, offsets, data = texts.buffers()
    if offsets is None:
        return np.zeros(len(texts) + 1, np.int64), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return ends, np.frombuffer(data if data is not None else b"", np.uint8)
