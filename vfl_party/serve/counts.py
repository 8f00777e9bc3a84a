"""Counts what is answered: rows by state and by absent party, requests, seconds."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from vfl_party.serve.scored import ServedScores

# Upper ends, in seconds.
ENDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.065, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass
class Counts:
    """Any thread may count.

    ``without``: {(party, why it took no part): rows}. ``within``: {end: requests that took no
    longer, and longer than the end before}. ``seconds``: of all requests. ``kept``: {party: rows
    for which its embedding was used again, and not asked for}.
    """

    rows: Counter[str] = field(default_factory=Counter)
    without: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    within: Counter[float] = field(default_factory=Counter)
    seconds: float = 0.0
    kept: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def scored(self, scores: ServedScores, seconds: float) -> None:
        """Counts a request that was scored."""
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
        """Counts embeddings that were kept."""
        with self.lock:
            self.kept[party] += rows

    def answered(self, status: int) -> None:
        """Counts a request by its HTTP status."""
        with self.lock:
            self.requests[status] += 1
