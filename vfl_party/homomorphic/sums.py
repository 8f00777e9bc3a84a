"""Computes the sums of a tree's entries from rows: first by code, then over prefixes of codes.

An entry is a set of codes of one column: the codes below some code, or a single code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic.scheme import Adder, Held, Integers, Wire

# The kinds of entries: the codes below a code, these codes and the column's last code, or a single
# code.
BELOW, BELOW_AND_LAST, SINGLE = range(3)
# Entries, [E, 4]: column, kind, code, the column's last code.
Entries = npt.NDArray[np.int32]
# The maximum number of places in one call's groups, so that their indices fit into memory.
_AT_ONCE = 1 << 21
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class SumPlan:
    """The plan to compute sums of entries from sums of buckets, as places for ``Adder.take``.

    ``entries``: The entries, in order. ``used``: The columns that have entries, with ``size``
    buckets each. ``firsts``: For each code in a prefix, the buckets of all columns with this code.
    ``plain``, ``with_last``: The running sums for entries of kinds BELOW and BELOW_AND_LAST.
    ``ends``: The buckets of the last codes. ``single``: The buckets of single codes. ``order``: The
    places of the entries among all these sums.
    """

    entries: Entries
    used: tuple[int, ...]
    size: int
    firsts: tuple[list[int], ...]
    plain: list[int]
    with_last: list[int]
    ends: list[int]
    single: list[int]
    order: list[int]

    @classmethod
    def of(cls, entries: Entries) -> SumPlan:
        """Makes the plan for ``entries``. Without entries, the plan is empty."""
        column_E, kind_E, code_E, last_E = entries.T.astype(np.int64)
        used, place_E = np.unique(column_E, return_inverse=True)
        width, size = len(used), int(last_E.max(initial=-1)) + 1
        of_kind = [np.flatnonzero(kind_E == kind) for kind in (BELOW, BELOW_AND_LAST, SINGLE)]
        order = np.empty(len(entries), np.int64)
        order[np.concatenate(of_kind)] = np.arange(len(entries))
        codes = int(code_E[kind_E != SINGLE].max(initial=0))
        running_E, bucket_E = (code_E - 1) * width + place_E, place_E * size
        below, with_last, single = of_kind
        return cls(
            entries,
            tuple(used.tolist()),
            size,
            tuple([column * size + code for column in range(width)] for code in range(codes)),
            running_E[below].tolist(),
            running_E[with_last].tolist(),
            (bucket_E + last_E)[with_last].tolist(),
            (bucket_E + code_E)[single].tolist(),
            order.tolist(),
        )


def sum_entries(adder: Adder, held: Held, rows: Integers, codes_NF: Codes, plan: SumPlan) -> Held:
    """Returns the sums over ``rows`` of each entry, in order. There must be at least one entry.

    ``codes_NF``: the codes of all columns for the rows of ``held``.
    """
    used_NF = codes_NF if len(plan.used) == codes_NF.shape[1] else codes_NF[:, list(plan.used)]
    # The buckets are ordered by column, then by code.
    buckets = bucket_sums(adder, held, rows, used_NF, plan.size)
    parts = []
    if plan.firsts:
        prefixes = [adder.take(buckets, plan.firsts[0])]
        for of_code in plan.firsts[1:]:
            prefixes.append(adder.add(prefixes[-1], adder.take(buckets, of_code)))
        running = adder.concatenate(prefixes)
        parts.append(adder.take(running, plan.plain))
        if plan.with_last:
            parts.append(
                adder.add(adder.take(running, plan.with_last), adder.take(buckets, plan.ends))
            )
    if plan.single:
        parts.append(adder.take(buckets, plan.single))
    return adder.take(adder.concatenate(parts), plan.order)


class Summing(Protocol):
    """Computes sums of a tree's gradients."""

    def sums(self, members: Sequence[Integers]) -> list[Held]:
        """Returns the sums of the plan's entries, at least one, over the rows of each node in
        ``members``.
        """
        ...


class SummingHere(Summing):
    """Implements ``Summing`` in this process."""

    def __init__(self, adder: Adder, wire_R: Wire, codes_RF: Codes, plan: SumPlan) -> None:
        """Raises CipherError if a ciphertext is out of range."""
        self._adder, self._held = adder, adder.load(wire_R)
        self._codes_RF, self._plan = codes_RF, plan

    def sums(self, members: Sequence[Integers]) -> list[Held]:
        return [
            sum_entries(self._adder, self._held, rows, self._codes_RF, self._plan)
            for rows in members
        ]


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
    """Returns the sums over the ``rows`` with each code, [F * size], by column, then by code, with
    about half of the usual additions.

    Two columns are summed together: first the rows of each pair of codes (a cell), then the cells
    of each code in either column. N rows of two columns with S codes each need at most N + 2 S²
    additions instead of 2 N.

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
