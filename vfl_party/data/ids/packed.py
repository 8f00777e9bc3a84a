"""Texts of many rows: small ones in memory, large ones in unnamed files.

They are Arrow's large strings in one piece: the bytes of all, and the end of each. Files are
mapped, so that Arrow works on them; ``release_texts`` unmaps what was read.
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
# Number of rows that are processed at once.
CHUNK = 1 << 16
# Maximum number of rows that are read from anywhere in a file into memory.
FEW = 1 << 12
# Bytes of memory a row while rows are sorted.
_ROW_BYTES = 64
# Mapped arrays by the address of their first byte.
_FILES: WeakValueDictionary[int, MappedArray] = WeakValueDictionary()


class GrowingTexts:
    """Texts that grow by blocks: in memory at first, in files once they are too large."""

    def __init__(self, space: Space) -> None:
        share = space.share()
        self._data, self._ends = share.growing((), np.uint8), share.growing((), np.int64)
        self._ends.append(np.zeros(1, np.int64))
        self._nulls: list[Positions] = []
        self._rows = self._bytes = 0

    def append(self, texts: pa.Array) -> None:
        """Adds rows, of which some may be null. Raises InputError if the disk is full."""
        offsets, data = offsets_and_bytes(pc.cast(texts, pa.large_string()))
        if texts.null_count:
            self._nulls.append(np.flatnonzero(texts.is_null().to_numpy(False)) + self._rows)
        self._ends.append(offsets[1:] + (self._bytes - offsets[0]))
        self._data.append(data[offsets[0] : offsets[-1]])
        self._rows += len(texts)
        self._bytes += int(offsets[-1] - offsets[0])

    def finish(self) -> pa.LargeStringArray:
        """Returns all rows. Raises InputError if the disk is full."""
        ends, data = _buffer(self._ends.finish()), _buffer(self._data.finish())
        if not self._nulls:
            return pa.LargeStringArray.from_buffers(self._rows, ends, data, None, 0)
        valid_N = np.ones(self._rows, bool)
        for rows in self._nulls:
            valid_N[rows] = False
        valid = pa.py_buffer(np.packbits(valid_N, bitorder="little"))
        return pa.LargeStringArray.from_buffers(self._rows, ends, data, valid)


class RowBuckets:
    """Rows and their texts, distributed over files that are each read at once.

    Args:
        space: of the files.
        count: of files.
    """

    def __init__(self, space: Space, count: int) -> None:
        files = replace(space, max_bytes=0)
        self._all: list[tuple[GrowingMatrix, GrowingTexts]] = [
            (files.growing((), np.int64), GrowingTexts(files)) for _ in range(count)
        ]

    def deal(self, to_B: npt.NDArray[Any], rows_B: Positions, texts_B: pa.Array) -> None:
        """Adds each row to its file; rows beyond the last file are left out. Raises InputError if
        the disk is full.

        Args:
            to_B: [B], the file of each row.
            rows_B: int64 [B].
            texts_B: [B].
        """
        order_B = np.argsort(to_B, kind="stable")
        ends = np.searchsorted(to_B[order_B], np.arange(len(self._all) + 1)).tolist()
        rows_B, texts_B = rows_B[order_B], texts_B.take(pa.array(order_B))
        for (rows, texts), first, end in zip(self._all, ends[:-1], ends[1:], strict=True):
            if end > first:
                rows.append(rows_B[first:end])
                texts.append(texts_B.slice(first, end - first))

    def __iter__(self) -> Iterator[tuple[Positions, pa.LargeStringArray]]:
        """Yields the rows of each file, in the order in which they were added, and removes it."""
        self._all.reverse()
        while self._all:
            rows, texts = self._all.pop()
            yield rows.finish(), texts.finish()


def texts_of(
    values: pa.Array, space: Space, change: Callable[[slice, pa.Array], pa.Array]
) -> pa.LargeStringArray:
    """Returns ``change(rows, texts)`` of all rows, part by part. Raises InputError if the disk is
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
        few = values.take(pa.array(rows))
        release_texts(values)
        return few
    result = GrowingTexts(space)
    if is_ascending(rows):
        for part in parts(len(rows), CHUNK):
            result.append(values.take(pa.array(rows[part])))
            release_texts(values)
            release(rows)
        return result.finish()
    size = size_of_piece(space, _ROW_BYTES, len(rows))
    places_N, dealt = places_of(rows, len(values)), RowBuckets(space, -(-len(rows) // size))
    for part in parts(len(values), CHUNK):
        places_B = places_N[part].astype(np.int64)
        dealt.deal(places_B // size, places_B, values[part])
        release_texts(values)
    for places, texts in dealt:
        result.append(texts.take(pa.array(np.argsort(places))))
    return result.finish()


def in_files(values: pa.Array) -> bool:
    """Returns whether texts are in files."""
    return next(_files(values), None) is not None


def release_texts(*texts: pa.Array) -> None:
    """Unmaps what was read of texts in files; the texts stay usable."""
    for array in texts:
        release(*_files(array))


def _files(values: pa.Array) -> Iterator[MappedArray]:
    for buffer in values.buffers() if isinstance(values, pa.Array) else ():
        mapped = None if buffer is None else _FILES.get(buffer.address)
        if mapped is not None:
            yield mapped


def _buffer(array: npt.NDArray[Any]) -> pa.Buffer:
    buffer = pa.py_buffer(array)
    if isinstance(array, MappedArray):
        _FILES[buffer.address] = array
    return buffer


def offsets_and_bytes(
    texts: pa.LargeStringArray,
) -> tuple[Positions, npt.NDArray[np.uint8]]:
    """Returns the start of each text in the bytes of all and the end of the last one, int64 [N +
    1], and the bytes, uint8.
    """
    _, offsets, data = texts.buffers()
    if offsets is None:
        return np.zeros(len(texts) + 1, np.int64), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return ends, np.frombuffer(data if data is not None else b"", np.uint8)
