"""Reports the spent and the remaining amounts for each data set and peer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from vfl_common.config.policy import AccountLimits
from vfl_common.text import align_columns
from vfl_governance.account.sums import BARE, OF_A_PERSON, OF_ALL, AccountSums, worst

# {key of a limit: its heading}, in the order of the table.
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
_WITHOUT_PRIVACY = "without privacy"
_HEAD = ("data set", "people", "peer", "runs", "since", "what", "spent", "limit", "left")
_NUMBERS = ("data set", "people", "runs", "spent", "limit", "left")


@dataclass(frozen=True)
class Spent:
    """The amounts that one peer has received about one data set.

    Args:
        data_set: The number of the data set. 0 is for bundles that are about no people.
        people: The number of people in the data set.
        peer: The peer.
        runs: The number of runs.
        spent: {key of a limit: amount}. For limits per person it is the maximum over people.
        uncovered: The maximum count of numbers about a person without differential privacy.
        first: The time of the first bundle in seconds since 1970.
        last: The time of the last bundle in seconds since 1970.
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
        """Returns the values for JSON, with the limits and the remaining amounts."""
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
            _WITHOUT_PRIVACY.replace(" ", "_"): self.uncovered,
            "first": self.first,
            "last": self.last,
        }


def sum_spent(sums: AccountSums, delta: float) -> Iterator[Spent]:
    """Yields the spent amounts for each data set and peer. ``delta``: The δ of ε."""
    persons = sums.persons
    names = np.unique(persons.sets).tolist()
    for number, data_set in enumerate([-1, *names]):
        person_numbers = np.flatnonzero(persons.sets == data_set)
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
                amounts[what] = int(sums.vector(peer, what)[person_numbers].max(initial=0))
            for what in OF_ALL:
                amounts[what] = sum(getattr(run, what) for run in runs)
            amounts["epsilon"] = worst(
                [(mechanism, first[person_numbers]) for mechanism, first in sums.costs(peer)], delta
            )
            without_privacy = int(sums.vector(peer, BARE)[person_numbers].max(initial=0))
            first = min((run.first for run in runs if run.first), default=0.0)
            last = max(run.last for run in runs)
            yield Spent(
                number, len(person_numbers), peer, len(runs), amounts, without_privacy, first, last
            )


def table(spent_: Iterable[Spent], limits: AccountLimits) -> list[str]:
    """Returns a table with a header and a line for each data set, peer and limit."""
    limits_ = limits.amounts
    rows: list[tuple[str, ...]] = [_HEAD]
    for row in spent_:
        row_start = (
            str(row.data_set),
            f"{row.people:,}",
            row.peer,
            f"{row.runs:,}",
            _format_day(row.first),
        )
        for key, heading in KEYS.items():
            value, limit = row.spent[key], limits_.get(key)
            if not value and limit is None:
                continue
            remaining = "" if limit is None else _format_amount(max(0, limit - value))
            limit_text = "no limit" if limit is None else _format_amount(limit)
            name = f"{heading} at δ = {limits.delta:g}" if key == "epsilon" else heading
            rows.append((*row_start, name, _format_amount(value), limit_text, remaining))
        if row.uncovered:
            rows.append(
                (
                    *row_start,
                    f"numbers a person, {_WITHOUT_PRIVACY}",
                    _format_amount(row.uncovered),
                    "",
                    "",
                )
            )
    return align_columns(rows, _NUMBERS)


def _format_amount(value: float) -> str:
    """Formats an amount. ε is rounded up."""
    if isinstance(value, int):
        return f"{value:,}"
    return "∞" if math.isinf(value) else f"{math.ceil(round(value * 1000, 6)) / 1000:g}"


def _format_day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d") if at else ""
