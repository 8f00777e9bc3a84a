"""Sorts ids, and counts missing and repeated ids."""

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
# The maximum length in bytes of ids that are sorted eight bytes at a time.
_LONGEST = 64
# The bytes of memory per row while rows are sorted, and the number of ids that are sampled for each
# part of a large table.
_ROW_BYTES, _SAMPLES = 64, 256
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
