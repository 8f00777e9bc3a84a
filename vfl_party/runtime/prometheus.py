"""A party's metrics for Prometheus: its progress, its ledger, the peers that it waits for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric

from vfl_common.ledger import Ledger
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
from vfl_common.rpc.messages import STATES
from vfl_party.base.step_timing import BOUNDS_S, Steps
from vfl_party.runtime.progress import RoundStanding


@dataclass
class PartyMetrics:
    """Makes the metrics at each scrape, in another thread than the training's.

    Args:
        info: constant facts: name, role, recipe, device.
        run_state: returns one of STATES.
        ends: returns {name: when the certificate ends}.
        peers: whom this party may wait for in a step: at the active party, the passive parties.
        waits_for: returns those whom it waits for now.
    """

    info: dict[str, str]
    standing: RoundStanding
    ledger: Ledger
    meter: TcpMeter
    run_state: Callable[[], str]
    ends: Callable[[], Mapping[str, datetime]]
    peers: Sequence[str] = ()
    waits_for: Callable[[], Sequence[str]] = lambda: ()

    def families(self) -> Iterator[Metric]:
        """Yields the metrics as they are now."""
        standing = self.standing
        info = InfoMetricFamily("vfl_party", "Who this is.")
        info.add_metric((), self.info)
        yield info
        yield state(self.run_state(), STATES)
        yield gauge(
            "vfl_generation", "How often the run has begun or resumed.", {(): standing.generation}
        )
        if standing.phase:
            place = (standing.phase,)
            yield gauge(
                "vfl_round",
                "Rounds done of the phase under way.",
                {place: standing.round},
                ("phase",),
            )
            yield gauge(
                "vfl_rounds", "Rounds that it has at most.", {place: standing.rounds}, ("phase",)
            )
        yield gauge(
            "vfl_run_steps",
            "Steps since the run began, as of the last round.",
            {(): standing.run_steps},
        )
        yield from self._steps()
        yield from self._iter_reported()
        if self.peers:
            yield gauge(
                "vfl_late_parties",
                "Parties that came too late and were left out.",
                {(): len(standing.without)},
            )
            yield make_awaited_gauge(self.peers, self.waits_for())
        yield certificate_gauge(self.ends())
        yield from traffic_counters(self.ledger, self.meter.counts())

    def _steps(self) -> Iterator[Metric]:
        phases = self.standing.steps
        made: dict[Labels, float] = {(phase,): float(steps.made) for phase, steps in phases.items()}
        yield counter(
            "vfl_steps_total",
            "Steps made by this process, repeated ones included.",
            made,
            ("phase",),
        )
        text = "From one step of training to the next (an epoch in head, a tree in gbdt)."
        histogram = HistogramMetricFamily("vfl_step_seconds", text, labels=("phase",))
        for phase, steps in phases.items():
            buckets, seconds = cumulative(steps)
            histogram.add_metric((phase,), buckets, seconds)
        yield histogram
        last_s = max((steps.last_s for steps in phases.values()), default=0.0)
        if last_s:
            at_s = time.time() - (time.monotonic() - last_s)
            yield gauge(
                "vfl_last_step_timestamp_seconds", "When the last step was done.", {(): at_s}
            )

    def _iter_reported(self) -> Iterator[Metric]:
        phase, metrics = self.standing.reported
        values: dict[Labels, float] = {
            (phase, split, name): value
            for split, named in metrics.items()
            for name, value in named.items()
        }
        loss = {key[:2]: value for key, value in values.items() if key[2] == "loss"}
        others = {key: value for key, value in values.items() if key[2] != "loss"}
        yield gauge("vfl_loss", "Mean loss of the last round.", loss, ("phase", "split"))
        yield gauge(
            "vfl_metric", "Other metrics of the last round.", others, ("phase", "split", "metric")
        )


def cumulative(steps: Steps) -> tuple[list[tuple[str, float]], float]:
    """Returns Prometheus' buckets, each with the number of steps up to its bound, and the sum of
    seconds.
    """
    counts, seconds = list(steps.counts), steps.seconds
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True)), seconds
