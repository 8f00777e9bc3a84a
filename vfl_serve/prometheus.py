"""The metrics of a serving party for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric

from vfl_common.bundle import Ledger
from vfl_common.prometheus import Labels, certificate_gauge, counter, make_gauge, traffic_counters
from vfl_serve.opening import ServedTally
from vfl_serve.scored import ENDS, Counts

_MODEL = ("model", "run")


@dataclass
class ServeMetrics:
    """Makes the metrics at each scrape.

    Args:
        info: Constant facts: name, role, recipe, device, version.
        tallies: {run id: the run's counts}.
        port: Counts requests by status.
        ready: Returns whether the record can be written.
        ends: Returns {name: the end of the certificate's validity}.
    """

    info: dict[str, str]
    tallies: Mapping[str, ServedTally]
    port: Counts
    ready: Callable[[], bool]
    ends: Callable[[], Mapping[str, datetime]]

    def families(self) -> Iterator[Metric]:
        """Yields all metrics."""
        info = InfoMetricFamily("vfl_party", "The party that this process runs.")
        info.add_metric((), self.info)
        yield info
        text = "1 while the record can be written; else no request is answered."
        yield make_gauge("vfl_serve_ready", text, {(): float(self.ready())})
        yield certificate_gauge(self.ends())
        yield from _make_standing_metrics(self.tallies.values())
        yield from _make_count_metrics(self.tallies, self.port)

    def state(self) -> str:
        """Returns the state for ``/healthz``: ``waiting`` while no run has a connected peer."""
        if not self.ready():
            return "failed"
        presence_by_run = [
            tally.standing().present for tally in self.tallies.values() if tally.standing
        ]
        return (
            "running"
            if any(not peers or any(peers.values()) for peers in presence_by_run)
            else "waiting"
        )


def _make_standing_metrics(tallies: Iterable[ServedTally]) -> Iterator[Metric]:
    present: dict[Labels, float] = {}
    waiting: dict[Labels, float] = {}
    for tally in tallies:
        # The run may be closed meanwhile.
        if (standing := tally.standing) is None:
            continue
        state, key = standing(), (tally.model, tally.run_id)
        present |= {(*key, peer): float(is_present) for peer, is_present in state.present.items()}
        if state.waiting is not None:
            waiting[key] = float(state.waiting)
    text = "1 while the peer attends the run and answers: a passive party, or the active one."
    yield make_gauge("vfl_serve_present", text, present, (*_MODEL, "peer"))
    text = "Requests that wait to be scored."
    yield make_gauge("vfl_serve_waiting_requests", text, waiting, _MODEL)


def _make_count_metrics(tallies: Mapping[str, ServedTally], port: Counts) -> Iterator[Metric]:
    """Yields the counts of each run, the requests by status, and the bytes by peer."""
    counted = list(tallies.values())
    rows: dict[Labels, float] = {}
    without: dict[Labels, float] = {}
    reused: dict[Labels, float] = {}
    latency = HistogramMetricFamily(
        "vfl_serve_seconds", "From a request's ids to its scores.", labels=_MODEL
    )
    total = Ledger()
    for tally in counted:
        key = (tally.model, tally.run_id)
        with tally.counts.lock:
            rows |= {(*key, state): float(count) for state, count in tally.counts.rows.items()}
            without |= {(*key, *of): float(count) for of, count in tally.counts.without.items()}
            reused |= {(*key, party): float(count) for party, count in tally.counts.kept.items()}
            within, seconds = dict(tally.counts.within), tally.counts.seconds
        latency.add_metric(key, _make_buckets(within), seconds)
        total.carry(tally.ledger.entries())
    with port.lock:
        requests: dict[Labels, float] = {
            (str(status),): float(count) for status, count in port.requests.items()
        }
    yield counter("vfl_serve_rows_total", "Rows that were answered.", rows, (*_MODEL, "state"))
    text = "Rows in which a party took no part, and why."
    yield counter("vfl_serve_rows_without_total", text, without, (*_MODEL, "party", "why"))
    text = "Rows for which a party's embedding was kept, and not asked for."
    yield counter("vfl_serve_rows_kept_total", text, reused, (*_MODEL, "party"))
    yield counter("vfl_serve_requests_total", "Requests, by HTTP's status.", requests, ("status",))
    yield latency
    yield from traffic_counters(total, ())


def _make_buckets(within: Mapping[float, int]) -> list[tuple[str, float]]:
    total, buckets = 0, list[tuple[str, float]]()
    for end in (*ENDS, float("inf")):
        total += within.get(end, 0)
        buckets.append(("+Inf" if end == float("inf") else str(end), total))
    return buckets
