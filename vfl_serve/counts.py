"""Counts answered rows by state and missing party, requests by status, and seconds."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from vfl_serve.scored import ServedScores

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
