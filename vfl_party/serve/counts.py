"""Counts what is answered, for Prometheus: rows by state and by party, requests, seconds."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from vfl_party.serve.scored import Scores

# Upper ends, in seconds.
_ENDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.065, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0)


@dataclass
class Counts:
    """Any thread may count."""

    rows: Counter[str] = field(default_factory=Counter)
    without: Counter[tuple[str, str]] = field(default_factory=Counter)
    requests: Counter[int] = field(default_factory=Counter)
    buckets: Counter[float] = field(default_factory=Counter)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def scored(self, found: Scores, seconds: float) -> None:
        """Counts a request that was scored."""
        end = next((each for each in _ENDS if seconds <= each), float("inf"))
        numbers = found.of_part.tolist()
        with self._lock:
            self.rows.update(found.state)
            for number, count in Counter(numbers).items():
                for party, why in found.parts[number].missing.items():
                    self.without[party, why] += count
            self.buckets[end] += 1
            self.seconds += seconds

    def answered(self, status: int) -> None:
        """Counts a request by its HTTP status."""
        with self._lock:
            self.requests[status] += 1

    def families(self) -> Iterator[Metric]:
        """Yields the counts as metrics."""
        with self._lock:
            rows = CounterMetricFamily(
                "vfl_serve_rows", "Rows that were answered, by state", labels=["state"]
            )
            for state, count in sorted(self.rows.items()):
                rows.add_metric([state], count)
            without = CounterMetricFamily(
                "vfl_serve_rows_without",
                "Rows in which a party took no part, and why",
                labels=["party", "why"],
            )
            for (party, why), count in sorted(self.without.items()):
                without.add_metric([party, why], count)
            requests = CounterMetricFamily(
                "vfl_serve_requests", "HTTP requests, by status", labels=["status"]
            )
            for status, count in sorted(self.requests.items()):
                requests.add_metric([str(status)], count)
            total, buckets = 0, list[tuple[str, float]]()
            for end in (*_ENDS, float("inf")):
                total += self.buckets[end]
                buckets.append(("+Inf" if end == float("inf") else str(end), total))
            latency = HistogramMetricFamily(
                "vfl_serve_seconds", "Seconds from a request's ids to its scores"
            )
            latency.add_metric([], buckets, self.seconds)
        yield from (rows, without, requests, latency)
