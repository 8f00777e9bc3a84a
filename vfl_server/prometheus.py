"""Reports to Prometheus which parties have joined, how far the run is, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import InfoMetricFamily, Metric

from vfl_common.bundle import Ledger
from vfl_common.errors import Code
from vfl_common.process.logs import version
from vfl_common.prometheus import (
    Labels,
    certificate_gauge,
    counter,
    make_awaited_gauge,
    make_gauge,
    state,
    traffic_counters,
)
from vfl_common.rpc.counters import TcpMeter
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.run import RunState, Status


@dataclass
class ServerMetrics:
    """Computes the metrics at each scrape.

    ``waits_for``: Returns the parties whose weights are late compared with other parties'.
    ``refused``: Returns {code: number of refusals}. ``ends``: Returns {name: when the certificate
    expires}.
    """

    coordinator: Coordinator
    ledger: Ledger
    meter: TcpMeter
    waits_for: Callable[[], Sequence[str]]
    refused: Callable[[], Mapping[str, int]]
    ends: Callable[[], Mapping[str, datetime]]

    def families(self) -> Iterator[Metric]:
        """Yields the metrics of the run at this moment."""
        coordinator, status = self.coordinator, self.coordinator.status()
        roster = [party.name for party in coordinator.recipe.parties]
        info = InfoMetricFamily("vfl_server", "The run that this server serves.")
        facts = {
            "run_id": coordinator.run_id,
            "recipe": coordinator.recipe.name,
            "job": coordinator.job,
        }
        info.add_metric((), facts | {"version": version()})
        yield info
        yield state(status.state.value, [run_state.value for run_state in RunState])
        yield make_gauge(
            "vfl_generation",
            "Number of times that the run has started or resumed.",
            {(): status.generation},
        )
        yield counter(
            "vfl_interruptions_total",
            "Number of times that the run was interrupted.",
            {(): status.interruptions},
        )
        # All codes start at 0, because Prometheus computes no rate from the first value of a
        # series.
        counts = self.refused()
        refused: dict[Labels, float] = {(code.name,): counts.get(code.name, 0) for code in Code}
        yield counter(
            "vfl_refusals_total",
            "Sessions, joins and streams that were refused.",
            refused,
            ("code",),
        )
        yield make_gauge(
            "vfl_run_seconds", "Seconds since the run first started.", {(): status.wall_s}
        )
        yield from _yield_party_metrics(status, roster)
        if status.phase:
            place = (status.phase,)
            yield make_gauge(
                "vfl_round",
                "Finished rounds of the current phase.",
                {place: status.round},
                ("phase",),
            )
            yield make_gauge(
                "vfl_rounds",
                "Planned rounds of the current phase.",
                {place: status.rounds},
                ("phase",),
            )
        yield make_gauge(
            "vfl_run_steps",
            "Training steps since the run began, as of the end of the last round.",
            {(): status.steps},
        )
        yield make_gauge(
            "vfl_party_metric",
            "Metrics that each party reported last.",
            _get_reported_metrics(status),
            ("party", "phase", "metric"),
        )
        yield make_awaited_gauge(roster, self.waits_for())
        yield certificate_gauge(self.ends())
        yield from traffic_counters(self.ledger, self.meter.counts())


def _yield_party_metrics(status: Status, roster: Sequence[str]) -> Iterator[Metric]:
    """Yields metrics of the parties' statuses: joined, left (no longer needed), or missing."""
    status_by_party = {
        name: "joined" if name in status.joined else "left" if name in status.left else "missing"
        for name in roster
    }
    statuses = list(status_by_party.values())
    counts: dict[Labels, float] = {
        (status_,): statuses.count(status_) for status_ in ("joined", "left", "missing")
    }
    yield make_gauge("vfl_parties", "Parties of the recipe, by status.", counts, ("status",))
    joined: dict[Labels, float] = {
        (name,): party_status == "joined" for name, party_status in status_by_party.items()
    }
    yield make_gauge("vfl_party_joined", "1 if the party has joined the run.", joined, ("party",))
    silent: dict[Labels, float] = {(name,): seconds for name, seconds in status.silent_s.items()}
    yield make_gauge(
        "vfl_party_silent_seconds",
        "Seconds since a connected party's last message.",
        silent,
        ("party",),
    )


def _get_reported_metrics(status: Status) -> dict[Labels, float]:
    """Returns ``{("bank", "splitnn", "validation loss"): 0.31}`` for every party that reports
    metrics.
    """
    return {
        (party, phase, name): value
        for party, (phase, metrics) in status.reported.items()
        for name, value in metrics.items()
    }
