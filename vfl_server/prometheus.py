"""Reports to Prometheus which parties have joined, how far the run is, and what was sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import InfoMetricFamily, Metric

from vfl_common.errors import Code
from vfl_common.ledger import Ledger
from vfl_common.process.logs import version
from vfl_common.prometheus import (
    Labels,
    certificate_gauge,
    counter,
    gauge,
    make_awaited_gauge,
    state,
    traffic_counters,
)
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.run import RunState, Status


@dataclass
class ServerMetrics:
    """The metrics, read at each scrape. ``waits_for``: the parties whose weights are due while
    others' have come.

    ``refused``: {code: refusals}. ``ends``: {name: when the certificate ends}.
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
        info = InfoMetricFamily("vfl_server", "Which run this is.")
        facts = {
            "run_id": coordinator.run_id,
            "recipe": coordinator.recipe.name,
            "job": coordinator.job,
        }
        info.add_metric((), facts | {"version": version()})
        yield info
        yield state(status.state.value, [run_state.value for run_state in RunState])
        yield gauge(
            "vfl_generation", "How often the run has started or resumed.", {(): status.generation}
        )
        yield counter(
            "vfl_interruptions_total", "How often it was interrupted.", {(): status.interruptions}
        )
        # A rate misses the first of a series that begins with it.
        counts = self.refused()
        refused: dict[Labels, float] = {(code.name,): counts.get(code.name, 0) for code in Code}
        yield counter(
            "vfl_refusals_total",
            "Sessions, joins and streams that were refused.",
            refused,
            ("code",),
        )
        yield gauge("vfl_run_seconds", "Since the run first started.", {(): status.wall_s})
        yield from _parties(status, roster)
        if status.phase:
            place = (status.phase,)
            yield gauge(
                "vfl_round", "Rounds done of the current phase.", {place: status.round}, ("phase",)
            )
            yield gauge(
                "vfl_rounds",
                "Planned rounds of the current phase.",
                {place: status.rounds},
                ("phase",),
            )
        yield gauge(
            "vfl_run_steps", "Steps since the run began, as of the last round.", {(): status.steps}
        )
        yield gauge(
            "vfl_party_metric",
            "Each party's last report.",
            _get_values(status),
            ("party", "phase", "metric"),
        )
        yield make_awaited_gauge(roster, self.waits_for())
        yield certificate_gauge(self.ends())
        yield from traffic_counters(self.ledger, self.meter.counts())


def _parties(status: Status, roster: Sequence[str]) -> Iterator[Metric]:
    """Counts the parties by status: joined, left (no longer needed), or missing."""
    places = {
        name: "joined" if name in status.joined else "left" if name in status.left else "missing"
        for name in roster
    }
    statuses = list(places.values())
    counts: dict[Labels, float] = {
        (status_,): statuses.count(status_) for status_ in ("joined", "left", "missing")
    }
    yield gauge("vfl_parties", "Parties of the recipe, by status.", counts, ("status",))
    joined: dict[Labels, float] = {(name,): place == "joined" for name, place in places.items()}
    yield gauge("vfl_party_joined", "1 if the party has joined the run.", joined, ("party",))
    silent: dict[Labels, float] = {(name,): seconds for name, seconds in status.silent_s.items()}
    yield gauge(
        "vfl_party_silent_seconds", "Since a connected party's last message.", silent, ("party",)
    )


def _get_values(status: Status) -> dict[Labels, float]:
    """Returns ``{("bank", "splitnn", "validation loss"): 0.31}`` for every party that reports
    metrics.
    """
    return {
        (party, phase, name): value
        for party, (phase, metrics) in status.told.items()
        for name, value in metrics.items()
    }
