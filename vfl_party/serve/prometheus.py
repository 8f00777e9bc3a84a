"""What a serving party tells Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric

from vfl_common.ledger import Ledger
from vfl_common.prometheus import Labels, counter, traffic
from vfl_party.serve.counts import ENDS, Counts
from vfl_party.serve.models.compare import Disagreement
from vfl_party.serve.opening import Tally

_MODEL = ("model", "run")


def families(tallies: Mapping[str, Tally], port: Counts) -> Iterator[Metric]:
    """Yields what was counted of each run, requests by status, and the bytes by peer."""
    told = list(tallies.values())
    rows: dict[Labels, float] = {}
    without: dict[Labels, float] = {}
    kept: dict[Labels, float] = {}
    latency = HistogramMetricFamily(
        "vfl_serve_seconds", "From a request's ids to its scores.", labels=_MODEL
    )
    total = Ledger()
    for each in told:
        key = (each.model, each.run_id)
        with each.counts.lock:
            rows |= {(*key, state): float(count) for state, count in each.counts.rows.items()}
            without |= {(*key, *of): float(count) for of, count in each.counts.without.items()}
            kept |= {(*key, party): float(count) for party, count in each.counts.kept.items()}
            within, seconds = dict(each.counts.within), each.counts.seconds
        latency.add_metric(key, _buckets(within), seconds)
        total.carry(each.ledger.entries())
    with port.lock:
        requests: dict[Labels, float] = {
            (str(status),): float(count) for status, count in port.requests.items()
        }
    yield counter("vfl_serve_rows_total", "Rows that were answered.", rows, (*_MODEL, "state"))
    text = "Rows in which a party took no part, and why."
    yield counter("vfl_serve_rows_without_total", text, without, (*_MODEL, "party", "why"))
    text = "Rows for which a party's embedding was kept, and not asked for."
    yield counter("vfl_serve_rows_kept_total", text, kept, (*_MODEL, "party"))
    yield counter("vfl_serve_requests_total", "Requests, by HTTP's status.", requests, ("status",))
    yield latency
    shadows = {(each.model, each.run_id): each.shadow for each in told if each.shadow is not None}
    yield from _shadows(shadows)
    yield from traffic(total, ())


def _buckets(within: Mapping[float, int]) -> list[tuple[str, float]]:
    total, found = 0, list[tuple[str, float]]()
    for end in (*ENDS, float("inf")):
        total += within.get(end, 0)
        found.append(("+Inf" if end == float("inf") else str(end), total))
    return found


def _shadows(shadows: Mapping[tuple[str, str], Disagreement]) -> Iterator[Metric]:
    rows: dict[Labels, float] = {}
    decided: dict[Labels, float] = {}
    apart: dict[Labels, float] = {}
    for key, each in shadows.items():
        with each.lock:
            rows[*key, "yes"], rows[*key, "no"] = float(each.rows), float(each.others)
            decided[key], apart[key] = float(each.decided), each.difference
    text = "Rows of which a shadow got a copy, and whether they could be compared."
    yield counter("vfl_serve_shadow_rows_total", text, rows, (*_MODEL, "compared"))
    text = "Compared rows that the shadow decides otherwise."
    yield counter("vfl_serve_shadow_differs_total", text, decided, _MODEL)
    text = "Absolute differences of the scores of compared rows, summed."
    yield counter("vfl_serve_shadow_difference_total", text, apart, _MODEL)
