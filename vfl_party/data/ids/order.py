"""Sorts ids, and counts missing and repeated ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import Duplicates
from vfl_party.data.ids.packed import (
    CHUNK,
    GrowingTexts,
    Positions,
    RowBuckets,
    offsets_and_bytes,
    release_texts,
)
from vfl_party.data.row_arrays import IN_MEMORY, Space, parts, size_of_piece

Id = str | None
# Maximum bytes of an id that is sorted eight bytes at a time.
_LONGEST = 64
# Bytes of memory a row while rows are sorted; ids sampled for each part to divide all ids.
_ROW_BYTES, _SAMPLES = 64, 256
_FIRST_BYTES = np.array(
    [0xFFFFFFFFFFFFFFFF ^ ((1 << 8 * (8 - count)) - 1) for count in range(9)], np.uint64
)


@dataclass(frozen=True)
class IdCounts:
    """Row counts of a source: all rows, and those left out without an id, with a repeated id, or
    without a label.
    """

    rows: int
    missing: int
    repeated: int
    unlabelled: int = 0

    @classmethod
    def of(cls, ids: pa.Array, remaining: int, unlabelled: int = 0) -> IdCounts:
        """Counts all rows: ``remaining`` are kept, ``unlabelled`` ids are null because their rows
        have no label.
        """
        missing = ids.null_count - unlabelled
        return cls(len(ids), missing, len(ids) - ids.null_count - remaining, unlabelled)

    @property
    def remaining(self) -> int:
        """The number of rows that are kept."""
        return self.rows - self.missing - self.repeated - self.unlabelled

    @property
    def left_out(self) -> str:
        """How many rows are left out and why, for a person; '' if all are kept."""
        why = [f"{self.missing:,} without an id"] if self.missing else []
        why += [f"{self.repeated:,} with a repeated id"] if self.repeated else []
        why += [f"{self.unlabelled:,} without a label"] if self.unlabelled else []
        return (
            f"{self.rows - self.remaining:,} of {self.rows:,} rows are left out: {', '.join(why)}"
            if why
            else ""
        )


@dataclass(frozen=True, eq=False)
class SortedRows:
    """The kept rows of a table, sorted by the UTF-8 bytes of their ids.

    Args:
        rows: int64 [N], their numbers.
        ids: theirs.
        repeated: (earlier row, first row that repeats its id); None if no id repeats.
    """

    rows: Positions
    ids: pa.LargeStringArray
    repeated: tuple[int, int] | None


def in_order(
    ids: pa.LargeStringArray, duplicates: Duplicates, space: Space = IN_MEMORY
) -> SortedRows:
    """Returns the rows to keep: those with an id, and of equal ids by policy the first one, or none
    for ``drop``.

    Many ids are sorted part by part in files of ``space``. Raises InputError if the disk is full.
    """
    rows, texts, repeated = space.share().growing((), np.int64), GrowingTexts(space), []
    for numbers, values, same in _sort(ids, space):
        if same.any():
            repeated.append(_first_repeated(numbers, same))
            left_out = same | np.append(same[1:], False) if duplicates == "drop" else same
            numbers, values = numbers[~left_out], values.filter(pa.array(~left_out))
        rows.append(numbers)
        texts.append(values)
    return SortedRows(
        rows.finish(), texts.finish(), min(repeated, key=lambda pair: pair[1], default=None)
    )


def select_rows(ids: Sequence[Id], duplicates: Duplicates) -> list[int]:
    """Returns the rows to keep, ascending; see ``in_order``."""
    return sorted(in_order(pa.array(ids, pa.large_string()), duplicates).rows.tolist())


def _first_repeated(rows: Positions, same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Returns (the earlier row, the first row that repeats its id). There must be one."""
    place = np.flatnonzero(same)[rows[same].argmin()]
    # Equal ids are in the order of their rows.
    first = place - 1 - int(same[:place][::-1].argmin())
    return int(rows[first]), int(rows[place])


def _sort(
    ids: pa.LargeStringArray, space: Space
) -> Iterator[tuple[Positions, pa.LargeStringArray, npt.NDArray[np.bool_]]]:
    """Yields the rows with an id, sorted by id and then by row, in ascending parts: rows, ids, and
    whether the previous row has the same id.
    """
    for rows, texts in _parts(ids, space):
        order = _order(texts)
        values = texts.take(pa.array(order))
        same = np.zeros(len(order), bool)
        if len(order) > 1:
            same[1:] = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(False)
        yield order if rows is None else rows[order], values, same


def _parts(
    ids: pa.LargeStringArray, space: Space
) -> Iterator[tuple[Positions | None, pa.LargeStringArray]]:
    """Yields the rows with an id and their ids, unsorted, all at once or in ascending parts. The
    rows are None if they are 0, 1, ….
    """
    size = size_of_piece(space, _ROW_BYTES, len(ids))
    if len(ids) <= size:
        present = np.flatnonzero(ids.is_valid().to_numpy(False)) if ids.null_count else None
        yield present, ids if present is None else ids.take(pa.array(present))
        return
    bounds = _bounds(ids, -(-len(ids) // size))
    dealt = RowBuckets(space, len(bounds) + 1)
    for part in parts(len(ids), CHUNK):
        texts = ids[part]
        rows = np.flatnonzero(texts.is_valid().to_numpy(False))
        texts = texts if len(rows) == len(texts) else texts.take(pa.array(rows))
        to_B = np.searchsorted(bounds, _beginnings(texts, bounds.itemsize), side="right")
        dealt.deal(to_B.astype(np.uint8), rows + part.start, texts)
        release_texts(ids)
    yield from dealt


def _bounds(ids: pa.LargeStringArray, count: int) -> npt.NDArray[np.bytes_]:
    """Returns the beginnings of up to ``count`` - 1 ids, ascending, that divide all ids into parts
    of similar size. Ids with the same beginning are in one part.
    """
    step = max(1, len(ids) // (_SAMPLES * count))
    sample_ids = ids.take(pa.array(np.arange(0, len(ids), step))).drop_null()
    release_texts(ids)
    lengths = _starts_and_lengths(sample_ids)[1]
    width = min(int(lengths.max(initial=1)), _LONGEST)
    sample = np.sort(_beginnings(sample_ids, width))
    return np.unique(sample[np.arange(1, count) * len(sample) // count]) if len(sample) else sample


def _beginnings(ids: pa.LargeStringArray, width: int) -> npt.NDArray[np.bytes_]:
    """Returns the first bytes of each id, up to ``width`` rounded up to eight. They compare as the
    ids do, but may be equal for different ids.
    """
    starts, lengths, data = _starts_and_lengths(ids)
    words = [_words(starts, lengths, data, start) for start in range(0, width, 8)]
    found_BW = np.stack(words, axis=1).astype(">u8")
    return found_BW.view(f"S{8 * len(words)}").reshape(-1)


def _order(ids: pa.LargeStringArray) -> Positions:
    """Returns the rows sorted by their ids' bytes, stably.

    The bytes are compared eight at a time, the last ones first: four times as fast as comparing
    whole ids. Bytes after an id's end are 0; of ids that differ in nothing else the shorter one
    comes first.
    """
    starts, lengths, data = _starts_and_lengths(ids)
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST or not longest:
        # A stable sort.
        rows: Positions = pc.array_sort_indices(ids).to_numpy().astype(np.int64)
        return rows
    order = (
        None if lengths.min() == longest else np.argsort(lengths.astype(np.uint8), kind="stable")
    )
    for start in reversed(range(0, longest, 8)):
        words_N = _words(starts, lengths, data, start)
        if order is None:
            order = np.argsort(words_N, kind="stable")
        elif words_N.min() != words_N.max():
            words_N = words_N[order]
            order = order[np.argsort(words_N, kind="stable")]
    assert order is not None  # noqa: S101 - an id has a byte
    return order


def _starts_and_lengths(
    ids: pa.LargeStringArray,
) -> tuple[Positions, npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Returns the start of each id in the bytes of all, its length, and the bytes."""
    offsets, data = offsets_and_bytes(ids)
    return offsets[:-1], np.diff(offsets).astype(np.int32), data


def _words(
    starts: Positions, lengths: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], start: int
) -> npt.NDArray[np.uint64]:
    """Returns eight bytes of each id, from its byte ``start``, as a number; 0 for bytes after its
    end.
    """
    words_N = np.zeros(len(starts), np.uint64)
    eight = np.lib.stride_tricks.sliding_window_view(data, 8) if len(data) >= 8 else None
    for part in parts(len(starts), CHUNK):
        at_B, counts_B = starts[part] + start, np.clip(lengths[part] - start, 0, 8)
        found_B = np.zeros(len(at_B), np.uint64)
        inside_B = at_B + 8 <= len(data)
        if eight is not None:
            found_B[inside_B] = eight[at_B[inside_B]].view(">u8").reshape(-1)
        # The last ids.
        for row in np.flatnonzero(~inside_B).tolist():
            found_B[row] = int.from_bytes(data[at_B[row] :][:8].tobytes().ljust(8, b"\0"), "big")
        words_N[part] = found_B & _FIRST_BYTES[counts_B]
    return words_N
