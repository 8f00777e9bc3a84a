"""Stores the texts of ids, sorts ids, and counts missing and repeated ids.

Texts of many rows are in memory if they are small, else in unnamed files. They are one array of
Arrow's large strings: the bytes of all texts, and the end of each text. Files are memory-mapped, so
that Arrow can use them. ``release_texts`` unmaps the pages that were read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import Duplicates
from vfl_party.data.row_arrays import (
    IN_MEMORY,
    GrowingMatrix,
    MappedArray,
    Space,
    is_ascending,
    parts,
    places_of,
    release,
    size_of_piece,
)


class Ids(Sequence[str]):
    """A sequence of ids (str) that takes little more memory than their text.

    Args:
        values: The ids as Arrow's large strings, without nulls.
        space: The space for many ids.
    """

    def __init__(self, values: pa.LargeStringArray, space: Space = IN_MEMORY) -> None:
        self.values, self.space = values, space

    @classmethod
    def of(cls, texts: Iterable[str]) -> Ids:
        """Converts ids to ``Ids``. An ``Ids`` is returned unchanged."""
        return texts if isinstance(texts, Ids) else cls(pa.array(texts, pa.large_string()))

    def take(self, rows: npt.NDArray[np.integer[Any]]) -> Ids:
        """Returns the ids of the given rows, int64 [B], in their order. Raises InputError if the
        disk is full.
        """
        return Ids(take_texts(self.values, rows, self.space), self.space)

    def among(self, others: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns whether each id is in ``others``, bool [N]."""
        mask: npt.NDArray[np.bool_] = pc.is_in(
            self.values, value_set=Ids.of(others).values
        ).to_numpy(False)
        return mask

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Ids: ...
    def __getitem__(self, at: int | slice) -> str | Ids:
        if isinstance(at, slice):
            return Ids(self.values[at], self.space)
        text: str = self.values[at].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), CHUNK):
            texts = self.values.slice(start, CHUNK).to_pylist()
            release_texts(self.values)
            yield from texts

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return bool(self.values.equals(other.values))
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(map(str.__eq__, self, other))
        )

    def __repr__(self) -> str:
        return f"Ids({len(self)})"


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


Id = str | None


# The maximum length in bytes of ids that are sorted eight bytes at a time.
_LONGEST = 64


# The number of ids that are sampled for each part of a large table.
_SAMPLES = 256


_FIRST_BYTES = np.array(
    [0xFFFFFFFFFFFFFFFF ^ ((1 << 8 * (8 - count)) - 1) for count in range(9)], np.uint64
)


@dataclass(frozen=True)
class IdCounts:
    """The number of all rows of a source, and of the rows that are left out because they have no
    id, a repeated id or no label.
    """

    rows: int
    missing: int
    repeated: int
    unlabelled: int = 0

    @classmethod
    def of(cls, ids: pa.Array, remaining: int, unlabelled: int = 0) -> IdCounts:
        """Counts the rows of ``ids``, of which ``remaining`` are kept. Missing ids are null, and so
        are the ids of ``unlabelled`` rows without a label.
        """
        missing = ids.null_count - unlabelled
        return cls(len(ids), missing, len(ids) - ids.null_count - remaining, unlabelled)

    @property
    def remaining(self) -> int:
        """The number of rows that are kept."""
        return self.rows - self.missing - self.repeated - self.unlabelled

    @property
    def left_out(self) -> str:
        """A sentence on how many rows are left out and why; '' if all rows are kept."""
        reasons = [f"{self.missing:,} without an id"] if self.missing else []
        reasons += [f"{self.repeated:,} with a repeated id"] if self.repeated else []
        reasons += [f"{self.unlabelled:,} without a label"] if self.unlabelled else []
        return (
            f"{self.rows - self.remaining:,} of {self.rows:,} rows are left out: "
            f"{', '.join(reasons)}"
            if reasons
            else ""
        )


@dataclass(frozen=True, eq=False)
class SortedRows:
    """The kept rows of a table, sorted by the UTF-8 bytes of their ids.

    Args:
        rows: The row numbers, int64 [N].
        ids: The ids of the rows.
        repeated: An earlier row and the first row that repeats its id; None if no id repeats.
    """

    rows: Positions
    ids: pa.LargeStringArray
    repeated: tuple[int, int] | None


def in_order(
    ids: pa.LargeStringArray, duplicates: Duplicates, space: Space = IN_MEMORY
) -> SortedRows:
    """Returns the rows to keep, sorted by id. Rows without an id are left out. Of rows with the
    same id, the policy ``drop`` keeps none, and the other policies keep the first.

    Many ids are sorted part by part in files of ``space``. Raises InputError if the disk is full.
    """
    rows, texts, repeated = space.share().growing((), np.int64), GrowingTexts(space), []
    for numbers, values, is_repeated in _sort(ids, space):
        if is_repeated.any():
            repeated.append(_find_repeated(numbers, is_repeated))
            left_out = (
                is_repeated | np.append(is_repeated[1:], False)
                if duplicates == "drop"
                else is_repeated
            )
            numbers, values = numbers[~left_out], values.filter(pa.array(~left_out))
        rows.append(numbers)
        texts.append(values)
    return SortedRows(
        rows.finish(), texts.finish(), min(repeated, key=lambda pair: pair[1], default=None)
    )


def select_rows(ids: Sequence[Id], duplicates: Duplicates) -> list[int]:
    """Returns the rows to keep, ascending; see ``in_order``."""
    return sorted(in_order(pa.array(ids, pa.large_string()), duplicates).rows.tolist())


def _find_repeated(rows: Positions, is_repeated: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Returns an earlier row and the first row that repeats its id. There must be such a row."""
    position = np.flatnonzero(is_repeated)[rows[is_repeated].argmin()]
    # Rows with the same id are in the order of the source, so the earliest comes first.
    first = position - 1 - int(is_repeated[:position][::-1].argmin())
    return int(rows[first]), int(rows[position])


def _sort(
    ids: pa.LargeStringArray, space: Space
) -> Iterator[tuple[Positions, pa.LargeStringArray, npt.NDArray[np.bool_]]]:
    """Yields the rows with an id, sorted by id and then by row, in ascending parts. Each part has
    the rows, their ids, and whether the previous row has the same id.
    """
    for rows, texts in _divide(ids, space):
        order = _sort_stable(texts)
        values = texts.take(pa.array(order))
        is_repeated = np.zeros(len(order), bool)
        if len(order) > 1:
            is_repeated[1:] = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(
                False
            )
        yield order if rows is None else rows[order], values, is_repeated


def _divide(
    ids: pa.LargeStringArray, space: Space
) -> Iterator[tuple[Positions | None, pa.LargeStringArray]]:
    """Yields the rows with an id and their ids, as one part or in parts of ascending ids. Within a
    part they are not sorted. The rows are None if they are all rows.
    """
    size = size_of_piece(space, _ROW_BYTES, len(ids))
    if len(ids) <= size:
        present = np.flatnonzero(ids.is_valid().to_numpy(False)) if ids.null_count else None
        yield present, ids if present is None else ids.take(pa.array(present))
        return
    bounds = _find_bounds(ids, -(-len(ids) // size))
    buckets = RowBuckets(space, len(bounds) + 1)
    for part in parts(len(ids), CHUNK):
        texts = ids[part]
        rows = np.flatnonzero(texts.is_valid().to_numpy(False))
        texts = texts if len(rows) == len(texts) else texts.take(pa.array(rows))
        part_B = np.searchsorted(bounds, _get_prefixes(texts, bounds.itemsize), side="right")
        buckets.distribute(part_B.astype(np.uint8), rows + part.start, texts)
        release_texts(ids)
    yield from buckets


def _find_bounds(ids: pa.LargeStringArray, count: int) -> npt.NDArray[np.bytes_]:
    """Returns up to ``count`` - 1 prefixes of ids, ascending, that divide all ids into parts of
    similar size. Ids with the same prefix are in the same part.
    """
    step = max(1, len(ids) // (_SAMPLES * count))
    sample_ids = ids.take(pa.array(np.arange(0, len(ids), step))).drop_null()
    release_texts(ids)
    lengths = _get_starts(sample_ids)[1]
    width = min(int(lengths.max(initial=1)), _LONGEST)
    sample = np.sort(_get_prefixes(sample_ids, width))
    return np.unique(sample[np.arange(1, count) * len(sample) // count]) if len(sample) else sample


def _get_prefixes(ids: pa.LargeStringArray, width: int) -> npt.NDArray[np.bytes_]:
    """Returns the first ``width`` bytes of each id, rounded up to a multiple of eight. These
    prefixes have the order of the ids, but different ids may have the same prefix.
    """
    starts, lengths, data = _get_starts(ids)
    words = [_get_words(starts, lengths, data, start) for start in range(0, width, 8)]
    words_BW = np.stack(words, axis=1).astype(">u8")
    return words_BW.view(f"S{8 * len(words)}").reshape(-1)


def _sort_stable(ids: pa.LargeStringArray) -> Positions:
    """Returns the rows in a stable order by the bytes of their ids.

    This is a radix sort by groups of eight bytes, the last group first, which is four times as fast
    as comparing whole ids. Bytes after the end of an id are 0. If ids differ in nothing else, the
    shorter id comes first.
    """
    starts, lengths, data = _get_starts(ids)
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST or not longest:
        # Arrow's sort is stable.
        rows: Positions = pc.array_sort_indices(ids).to_numpy().astype(np.int64)
        return rows
    order = (
        None if lengths.min() == longest else np.argsort(lengths.astype(np.uint8), kind="stable")
    )
    for start in reversed(range(0, longest, 8)):
        words_N = _get_words(starts, lengths, data, start)
        if order is None:
            order = np.argsort(words_N, kind="stable")
        elif words_N.min() != words_N.max():
            words_N = words_N[order]
            order = order[np.argsort(words_N, kind="stable")]
    assert order is not None  # noqa: S101 - an id has a byte
    return order


def _get_starts(
    ids: pa.LargeStringArray,
) -> tuple[Positions, npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Returns the start and the length of each id in the bytes of all ids, and these bytes."""
    offsets, data = offsets_and_bytes(ids)
    return offsets[:-1], np.diff(offsets).astype(np.int32), data


def _get_words(
    starts: Positions, lengths: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], start: int
) -> npt.NDArray[np.uint64]:
    """Returns eight bytes of each id, from its byte ``start``, as one number. Bytes after the end
    of an id are 0.
    """
    words_N = np.zeros(len(starts), np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(data, 8) if len(data) >= 8 else None
    for part in parts(len(starts), CHUNK):
        positions_B, counts_B = starts[part] + start, np.clip(lengths[part] - start, 0, 8)
        words_B = np.zeros(len(positions_B), np.uint64)
        inside_B = positions_B + 8 <= len(data)
        if windows is not None:
            words_B[inside_B] = windows[positions_B[inside_B]].view(">u8").reshape(-1)
        # The last ids have fewer than eight bytes after their start.
        for row in np.flatnonzero(~inside_B).tolist():
            words_B[row] = int.from_bytes(
                data[positions_B[row] :][:8].tobytes().ljust(8, b"\0"), "big"
            )
        words_N[part] = words_B & _FIRST_BYTES[counts_B]
    return words_N
