"""Computes the sums of a tree's entries from rows: first by code, then over prefixes of codes.

An entry is a set of codes of one column: the codes below some code, or a single code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic.buckets import Codes, bucket_sums
from vfl_party.homomorphic.scheme import Adder, Held, Integers, Wire

# The kinds of entries: the codes below a code, these codes and the column's last code, or a single
# code.
BELOW, BELOW_AND_LAST, SINGLE = range(3)
# Entries, [E, 4]: column, kind, code, the column's last code.
Entries = npt.NDArray[np.int32]


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


class SummingHere:
    """Computes sums in this process."""

    def __init__(self, adder: Adder, wire_R: Wire, codes_RF: Codes, plan: SumPlan) -> None:
        """Raises CipherError if a ciphertext is out of range."""
        self._adder, self._held = adder, adder.load(wire_R)
        self._codes_RF, self._plan = codes_RF, plan

    def sums(self, members: Sequence[Integers]) -> list[Held]:
        """See ``Summing``."""
        return [
            sum_entries(self._adder, self._held, rows, self._codes_RF, self._plan)
            for rows in members
        ]
