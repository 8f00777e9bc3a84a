"""What a serving party tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric

from vfl_common.ledger import Ledger
from vfl_common.prometheus import Labels, counter, traffic
from vfl_party.serve.counts import ENDS, Counts


def families(counts: Counts, ledger: Ledger) -> Iterator[Metric]:
    """Yields what was counted, and the bytes by peer."""
    with counts.lock:
        rows: dict[Labels, float] = {(state,): float(count) for state, count in counts.rows.items()}
        without: dict[Labels, float] = {key: float(count) for key, count in counts.without.items()}
        requests: dict[Labels, float] = {
            (str(status),): float(count) for status, count in counts.requests.items()
        }
        within, seconds = dict(counts.within), counts.seconds
        kept: dict[Labels, float] = {(name,): float(count) for name, count in counts.kept.items()}
    yield counter("vfl_serve_rows_total", "Rows that were answered.", rows, ("state",))
    text = "Rows in which a party took no part, and why."
    yield counter("vfl_serve_rows_without_total", text, without, ("party", "why"))
    text = "Rows for which a party's embedding was kept, and not asked for."
    yield counter("vfl_serve_rows_kept_total", text, kept, ("party",))
    yield counter("vfl_serve_requests_total", "HTTP requests.", requests, ("status",))
    total, buckets = 0, list[tuple[str, float]]()
    for end in (*ENDS, float("inf")):
        total += within.get(end, 0)
        buckets.append(("+Inf" if end == float("inf") else str(end), total))
    latency = HistogramMetricFamily("vfl_serve_seconds", "From a request's ids to its scores.")
    latency.add_metric((), buckets, seconds)
    yield latency
    yield from traffic(ledger, ())
