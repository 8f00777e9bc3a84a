"""Sums ciphertexts by the codes of many columns, with about half of the usual additions.

Two columns are summed together: first the rows of each pair of codes (a cell), then the cells of
each code in either column. N rows of two columns with S codes each need at most N + 2 S² additions
instead of 2 N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic.scheme import Adder, Held, Integers

# The maximum number of places in one call's groups, so that their indices fit into memory.
_AT_ONCE = 1 << 21
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Groups:
    """Groups of places whose ciphertexts are summed. Group g is ``places[ends[g - 1]:ends[g]]``,
    and no group is empty. ``keys``: The key of each group, [G].
    """

    places: Integers
    ends: Integers
    keys: Integers

    @classmethod
    def of(cls, places: Integers, keys_P: npt.NDArray[np.integer], first: int = 0) -> Groups:
        """Groups ``places`` by their keys, in the order of the keys. ``first``: The number that is
        added to every key.
        """
        # NumPy sorts 16-bit keys in linear time.
        order = np.argsort(keys_P, kind="stable")
        sorted_P = keys_P[order]
        ends = np.flatnonzero(np.diff(sorted_P, append=-1)) + 1
        return cls(places[order], ends, sorted_P[ends - 1].astype(np.int64) + first)

    @classmethod
    def concatenate(cls, parts: list[Groups]) -> Groups:
        """Concatenates the groups of all ``parts``."""
        shifts = np.cumsum([0, *(len(group.places) for group in parts)])
        return cls(
            np.concatenate([group.places for group in parts]),
            np.concatenate(
                [group.ends + shift for group, shift in zip(parts, shifts[:-1], strict=True)]
            ),
            np.concatenate([group.keys for group in parts]),
        )


def bucket_sums(adder: Adder, held: Held, rows: Integers, codes_NF: Codes, size: int) -> Held:
    """Returns the sums over the ``rows`` with each code, [F * size], by column, then by code.

    ``codes_NF``: from 0 to ``size`` - 1, of all rows.
    """
    columns = codes_NF.shape[1]
    # A place of -1 stands for the encrypted zero, which comes last.
    parts, place = [], np.full(columns * size, -1)
    count = 0
    for keys, sums in _yield_sums(adder, held, rows, codes_NF, size):
        place[keys] = count + np.arange(len(keys))
        count += len(keys)
        parts.append(sums)
    place[place < 0] = count
    return adder.take(adder.concatenate([*parts, adder.zero()]), place.tolist())


def _yield_sums(
    adder: Adder, held: Held, rows: Integers, codes_NF: Codes, size: int
) -> Iterator[tuple[Integers, Held]]:
    """Yields the places and sums of the buckets that are not empty, some columns at a time."""
    columns = codes_NF.shape[1]
    if not len(rows):
        return
    paired = 2 * (columns // 2) if 2 * size * size < len(rows) else 0
    step = max(1, _AT_ONCE // len(rows))
    for first in range(0, paired, 2 * step):
        cells = Groups.concatenate(
            [
                Groups.of(rows, _compute_cells(codes_NF, rows, column, size), column * size * size)
                for column in range(first, min(paired, first + 2 * step), 2)
            ]
        )
        column, numbers = cells.keys // (size * size), np.arange(len(cells.keys))
        a, b = cells.keys // size % size, cells.keys % size
        buckets = Groups.concatenate(
            [Groups.of(numbers, column * size + a), Groups.of(numbers, (column + 1) * size + b)]
        )
        yield (
            buckets.keys,
            adder.sums(adder.sums(held, cells.places, cells.ends), buckets.places, buckets.ends),
        )
    for first in range(paired, columns, step):
        own = range(first, min(columns, first + step))
        buckets = Groups.concatenate(
            [Groups.of(rows, codes_NF[rows, column], column * size) for column in own]
        )
        yield buckets.keys, adder.sums(held, buckets.places, buckets.ends)


def _compute_cells(
    codes_NF: Codes, rows: Integers, column: int, size: int
) -> npt.NDArray[np.int16]:
    """Returns each row's cell of a column and the next one. There are at most 120 codes
    (``settings.MAX_CODES``).
    """
    cells: npt.NDArray[np.int16] = (
        codes_NF[rows, column].astype(np.int16) * np.int16(size) + codes_NF[rows, column + 1]
    )
    return cells
