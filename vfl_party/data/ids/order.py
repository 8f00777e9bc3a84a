"""Sorts ids, and counts missing and repeated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import Duplicates
from vfl_party.data.ids.texts import CHUNK
from vfl_party.data.row_arrays import parts

Id = str | None
Positions = npt.NDArray[np.int64]
# Bytes of an id that is sorted eight bytes at a time.
_LONGEST = 64
_FIRST_BYTES = np.array(
    [0xFFFFFFFFFFFFFFFF ^ ((1 << 8 * (8 - count)) - 1) for count in range(9)], np.uint64
)


@dataclass(frozen=True)
class IdCounts:
    """``rows`` of a source, those that miss an id, and those that are left out because another row
    has theirs, or because they have no label.
    """

    rows: int
    missing: int
    repeated: int
    unlabelled: int = 0

    @classmethod
    def of(cls, ids: pa.Array, kept: int, unlabelled: int = 0) -> IdCounts:
        """Counts all rows: ``kept`` stay, ``unlabelled`` ids are null for want of a label."""
        missing = ids.null_count - unlabelled
        return cls(len(ids), missing, len(ids) - ids.null_count - kept, unlabelled)

    @property
    def kept(self) -> int:
        return self.rows - self.missing - self.repeated - self.unlabelled

    @property
    def left_out(self) -> str:
        """Words how many rows are left out, and why; '' if all are kept."""
        why = [f"{self.missing:,} without an id"] if self.missing else []
        why += [f"{self.repeated:,} with a repeated id"] if self.repeated else []
        why += [f"{self.unlabelled:,} without a label"] if self.unlabelled else []
        return (
            f"{self.rows - self.kept:,} of {self.rows:,} rows are left out: {', '.join(why)}"
            if why
            else ""
        )


def in_order(ids: pa.LargeStringArray, duplicates: Duplicates) -> Positions:
    """Returns the rows to keep, sorted by the UTF-8 bytes of their ids: those with an id, and of
    equal ones by policy.

    The first of equal ids is kept, or none of them for ``drop``.
    """
    rows, same = _sorted(ids)
    if duplicates == "drop":
        same = same | np.append(same[1:], False)
    return rows[~same]


def kept_rows(ids: Sequence[Id], duplicates: Duplicates) -> list[int]:
    """Returns the rows to keep, ascending: see ``in_order``."""
    return sorted(in_order(pa.array(ids, pa.large_string()), duplicates).tolist())


def first_repeated(ids: pa.LargeStringArray) -> tuple[int, int]:
    """Returns the first row that has the id of an earlier one: (the earlier row, the row). There
    must be one.
    """
    rows, same = _sorted(ids)
    place = np.flatnonzero(same)[rows[same].argmin()]
    # Equal ids are in the order of their rows.
    first = place - 1 - int(same[:place][::-1].argmin())
    return int(rows[first]), int(rows[place])


def _sorted(ids: pa.LargeStringArray) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Returns the rows with an id, sorted by it and then by row, and for each whether the one
    before has its id.
    """
    present = np.flatnonzero(ids.is_valid().to_numpy(False)) if ids.null_count else None
    ids = ids if present is None else ids.take(pa.array(present))
    order = _order(ids)
    values = ids.take(pa.array(order))
    same = np.zeros(len(order), bool)
    if len(order) > 1:
        same[1:] = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(False)
    return order if present is None else present[order], same


def _order(ids: pa.LargeStringArray) -> Positions:
    """Returns the rows sorted by their ids' bytes, those of equal ids in their order.

    The bytes are compared eight at a time, the last ones first: four times as fast as one id with
    another. Where an id ends, its bytes are 0; of ids that differ in nothing else the shorter one
    comes first.
    """
    starts, lengths, data = _bytes(ids)
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


def _bytes(
    ids: pa.LargeStringArray,
) -> tuple[Positions, npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Returns where each id begins in the bytes of all, how many it has, and the bytes."""
    offsets = np.frombuffer(ids.buffers()[1], np.int64)[ids.offset : ids.offset + len(ids) + 1]
    data = ids.buffers()[2]
    return (
        offsets[:-1],
        np.diff(offsets).astype(np.int32),
        np.frombuffer(data if data is not None else b"", np.uint8),
    )


def _words(
    starts: Positions, lengths: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], start: int
) -> npt.NDArray[np.uint64]:
    """Returns eight bytes of each id, from its byte ``start``, as a number; 0 for bytes that it has
    not.
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
