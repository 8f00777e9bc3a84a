"""The scores of a request, with the parties of each row and the reasons of missing parties."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

# The state of a row. ``scored``: all parties took part. ``partly``: some parties took part.
# ``unknown``: no required party knows the id. ``refused``: the parties give less quality than
# requested. ``failed``: the score is not a number, or the active party's features cannot be read.
# ``incomplete``: the model cannot score without a missing party. ``unmeasured``: the quality
# without a missing party was never measured.
State = Literal["scored", "partly", "unknown", "refused", "failed", "incomplete", "unmeasured"]
# The reason why a party took no part in a row. ``not answered``: a passive party does not know the
# id, has refused it, or cannot use its features; it does not reveal which. ``unknown id``: the
# active party does not know the id. ``not needed``: parties hold different rows, and an earlier
# party has answered.
Why = Literal["not answered", "unknown id", "away", "late", "failed", "not needed"]


@dataclass(frozen=True)
class RequestPart:
    """The parties of a row's score.

    Args:
        parties: The parties that take part, in the recipe's order.
        missing: {missing party: the reason}.
        quality: The measured quality of the model with these parties; None if not measured.
        run: The id of the run that scores the row.
    """

    parties: tuple[str, ...]
    missing: Mapping[str, Why]
    quality: float | None = None
    run: str = ""


@dataclass(frozen=True)
class ServedScores:
    """The scores of N rows.

    Args:
        columns: {result column: values [N]}; undefined for rows without a score.
        state: The state of each row.
        parts: The different sets of parties of the rows.
        part_numbers: int64 [N], the index into ``parts`` of each row.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    state: Sequence[State]
    parts: Sequence[RequestPart]
    part_numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.state)

    def slice_rows(self, rows: slice) -> ServedScores:
        """Returns the scores of a slice of the rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return ServedScores(columns, self.state[rows], self.parts, self.part_numbers[rows])

    def with_run(self, run_id: str) -> ServedScores:
        """Returns the same scores with the id of the run that made them."""
        return replace(self, parts=[replace(part, run=run_id) for part in self.parts])

    def part(self, row: int) -> RequestPart:
        """Returns the parties of a row's score."""
        return self.parts[int(self.part_numbers[row])]

    @property
    def has_score(self) -> list[bool]:
        """Returns whether each row has a score."""
        return [state in ("scored", "partly") for state in self.state]


# Upper bounds of the histogram of latencies, in seconds.
ENDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.065, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass
class Counts:
    """The counts of a served run, or of a port. Any thread may count.

    Args:
        rows: {state: rows}.
        without: {(party, why it took no part): rows}.
        requests: {HTTP status: requests}.
        within: {upper bound of a bucket: requests}.
        seconds: The sum over all requests.
        kept: {party: rows for which its cached embedding was used}.
    """

    rows: Counter[str] = field(default_factory=Counter)
    without: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    within: Counter[float] = field(default_factory=Counter)
    seconds: float = 0.0
    kept: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def count_scored(self, scores: ServedScores, seconds: float) -> None:
        """Counts a scored request."""
        end = next((bound for bound in ENDS if seconds <= bound), float("inf"))
        numbers = Counter(scores.part_numbers.tolist())
        with self.lock:
            self.rows.update(scores.state)
            for number, count in numbers.items():
                for party, why in scores.parts[number].missing.items():
                    self.without[party, why] += count
            self.within[end] += 1
            self.seconds += seconds

    def count_reused(self, party: str, rows: int) -> None:
        """Counts rows for which a party's cached embedding was used."""
        with self.lock:
            self.kept[party] += rows

    def count_answered(self, status: int) -> None:
        """Counts a request by its HTTP status."""
        with self.lock:
            self.requests[status] += 1
