"""What has been spent on each data set at each peer, and what is left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from vfl_common.config.account import AccountLimits
from vfl_common.text import align_columns
from vfl_party.account.sums import BARE, OF_A_PERSON, OF_ALL, AccountSums, worst

# In the order of the table: the key of the limit, and the heading.
KEYS = {
    "epsilon": "ε",
    "numbers_of_a_person": "numbers a person",
    "bytes_of_a_person": "bytes a person",
    "bytes": "bytes",
    "split_bits": "split bits a person",
    "alignments": "alignments",
    "predictions": "predictions",
    "predictions_of_a_person": "predictions a person",
    "asked": "ids asked for",
}
_UNCOVERED = "without privacy"
_HEAD = ("data set", "people", "peer", "runs", "since", "what", "spent", "limit", "left")
_NUMBERS = ("data set", "people", "runs", "spent", "limit", "left")


@dataclass(frozen=True)
class Spent:
    """What one peer has got about one data set.

    ``data_set``: its number, 0 for what is about nobody; ``people``: in it; ``runs``: how many;
    ``spent``: by the key of the limit, of a person the most of any; ``uncovered``: the most numbers
    of any person that no mechanism makes private; ``first``, ``last``: when bundles left, in
    seconds since 1970.
    """

    data_set: int
    people: int
    peer: str
    runs: int
    spent: dict[str, float]
    uncovered: int
    first: float
    last: float

    def fields(self, limits: AccountLimits) -> dict[str, Any]:
        """Returns the facts for JSON, with the limits and what is left."""
        limits_ = limits.amounts
        return {
            "data_set": self.data_set,
            "people": self.people,
            "peer": self.peer,
            "runs": self.runs,
            "delta": limits.delta,
            "spent": {
                name: None if math.isinf(value) else value for name, value in self.spent.items()
            },
            "limits": limits_,
            "left": {name: max(0, limit - self.spent[name]) for name, limit in limits_.items()},
            _UNCOVERED.replace(" ", "_"): self.uncovered,
            "first": self.first,
            "last": self.last,
        }


def sum_spent(sums: AccountSums, delta: float) -> Iterator[Spent]:
    """Yields what has been spent, by data set and peer. ``delta``: of ε."""
    persons = sums.persons
    names = np.unique(persons.sets).tolist()
    for number, data_set in enumerate([-1, *names]):
        who = np.flatnonzero(persons.sets == data_set)
        for peer in sums.peers:
            runs = [
                run
                for (to, _), run in sums.runs.items()
                if to == peer and sums.data_set(run.person) == data_set
            ]
            if not runs:
                continue
            amounts: dict[str, float] = dict.fromkeys(KEYS, 0)
            for what in OF_A_PERSON:
                amounts[what] = int(sums.vector(peer, what)[who].max(initial=0))
            for what in OF_ALL:
                amounts[what] = sum(getattr(run, what) for run in runs)
            amounts["epsilon"] = worst(
                [(mechanism, times[who]) for mechanism, times in sums.costs(peer)], delta
            )
            bare = int(sums.vector(peer, BARE)[who].max(initial=0))
            times = min((run.first for run in runs if run.first), default=0.0)
            last = max(run.last for run in runs)
            yield Spent(number, len(who), peer, len(runs), amounts, bare, times, last)


def table(spent_: Iterable[Spent], limits: AccountLimits) -> list[str]:
    """Returns a line for each data set, peer and key, below a line of headings."""
    limits_ = limits.amounts
    rows: list[tuple[str, ...]] = [_HEAD]
    for row in spent_:
        of = str(row.data_set), f"{row.people:,}", row.peer, f"{row.runs:,}", _day(row.first)
        for key, heading in KEYS.items():
            value, limit = row.spent[key], limits_.get(key)
            if not value and limit is None:
                continue
            left = "" if limit is None else _render(max(0, limit - value))
            limit_text = "no limit" if limit is None else _render(limit)
            name = f"{heading} at δ = {limits.delta:g}" if key == "epsilon" else heading
            rows.append((*of, name, _render(value), limit_text, left))
        if row.uncovered:
            rows.append((*of, f"numbers a person, {_UNCOVERED}", _render(row.uncovered), "", ""))
    return align_columns(rows, _NUMBERS)


def _render(value: float) -> str:
    """Returns the text of a figure; ε is rounded up."""
    if isinstance(value, int):
        return f"{value:,}"
    return "∞" if math.isinf(value) else f"{math.ceil(round(value * 1000, 6)) / 1000:g}"


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d") if at else ""
