"""Reports a party's metrics to Prometheus: its progress, its ledger and the peers that it waits
for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from prometheus_client.core import HistogramMetricFamily, InfoMetricFamily, Metric

from vfl_common.bundle import Ledger
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
from vfl_common.rpc.messages import STATES
from vfl_party.base.step_timing import BOUNDS_S, Steps
from vfl_party.runtime.progress import RoundStanding


@dataclass
class PartyMetrics:
    """Computes the metrics at each scrape, in another thread than training.

    Args:
        info: Constant facts: name, role, recipe, device.
        run_state: Returns one of STATES.
        ends: Returns {name: when the certificate expires}.
        peers: The peers that this party may wait for in a step: at the active party, the passive
            parties.
        waits_for: Returns the peers that this party waits for now.
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
        """Yields the current metrics."""
        standing = self.standing
        info = InfoMetricFamily("vfl_party", "The party that this process runs.")
        info.add_metric((), self.info)
        yield info
        yield state(self.run_state(), STATES)
        yield make_gauge(
            "vfl_generation",
            "Number of times that the run has started or resumed.",
            {(): standing.generation},
        )
        if standing.phase:
            place = (standing.phase,)
            yield make_gauge(
                "vfl_round",
                "Finished rounds of the current phase.",
                {place: standing.round},
                ("phase",),
            )
            yield make_gauge(
                "vfl_rounds",
                "Maximum number of rounds of the current phase.",
                {place: standing.rounds},
                ("phase",),
            )
        yield make_gauge(
            "vfl_run_steps",
            "Training steps since the run began, as of the end of the last round.",
            {(): standing.run_steps},
        )
        yield from self._yield_step_metrics()
        yield from self._yield_reported_metrics()
        if self.peers:
            yield make_gauge(
                "vfl_late_parties",
                "Parties that came too late and were left out.",
                {(): len(standing.without)},
            )
            yield make_awaited_gauge(self.peers, self.waits_for())
        yield certificate_gauge(self.ends())
        yield from traffic_counters(self.ledger, self.meter.counts())

    def _yield_step_metrics(self) -> Iterator[Metric]:
        phases = self.standing.steps
        step_counts: dict[Labels, float] = {
            (phase,): float(steps.made) for phase, steps in phases.items()
        }
        yield counter(
            "vfl_steps_total",
            "Training steps of this process, with repeated steps.",
            step_counts,
            ("phase",),
        )
        text = "Seconds from one training step to the next (an epoch in head, a tree in gbdt)."
        histogram = HistogramMetricFamily("vfl_step_seconds", text, labels=("phase",))
        for phase, steps in phases.items():
            buckets, seconds = make_buckets(steps)
            histogram.add_metric((phase,), buckets, seconds)
        yield histogram
        last_s = max((steps.last_s for steps in phases.values()), default=0.0)
        if last_s:
            at_s = time.time() - (time.monotonic() - last_s)
            yield make_gauge(
                "vfl_last_step_timestamp_seconds",
                "Time at which the last step was finished.",
                {(): at_s},
            )

    def _yield_reported_metrics(self) -> Iterator[Metric]:
        phase, metrics = self.standing.reported
        values: dict[Labels, float] = {
            (phase, split, name): value
            for split, split_metrics in metrics.items()
            for name, value in split_metrics.items()
        }
        loss = {key[:2]: value for key, value in values.items() if key[2] == "loss"}
        other_metrics = {key: value for key, value in values.items() if key[2] != "loss"}
        yield make_gauge("vfl_loss", "Mean loss of the last round.", loss, ("phase", "split"))
        yield make_gauge(
            "vfl_metric",
            "Other metrics of the last round.",
            other_metrics,
            ("phase", "split", "metric"),
        )


def make_buckets(steps: Steps) -> tuple[list[tuple[str, float]], float]:
    """Returns Prometheus' buckets, each with the number of steps up to its upper bound, and the sum
    of the steps' seconds.
    """
    counts, seconds = list(steps.counts), steps.seconds
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, itertools.accumulate(counts)), strict=True)), seconds
