"""Reports a round of self-supervision."""

from __future__ import annotations

from collections.abc import Mapping

from vfl_party.base.phase import RoundReport
from vfl_party.selfsup.local import Epochs

# The share of variance below which projections have collapsed; trained encoders keep 0.5 and more.
COLLAPSED = 0.02


def report(party: str, done: Mapping[str, Epochs], warned: set[str] | None = None) -> RoundReport:
    """Makes the report of one party's round: loss and ``variance_kept`` of each step, and a warning
    if projections collapse.

    ``done``: {step: the result of its epochs}. ``warned``: The steps with an earlier warning, which
    get no second warning. This function adds new ones.
    """
    warned = set() if warned is None else warned
    notes = [
        f"{party}: projections of the {step} step keep {epochs.variance_kept:.0%} of their "
        "variance: they are collapsing"
        for step, epochs in done.items()
        if epochs.variance_kept < COLLAPSED and step not in warned
    ]
    warned |= {step for step, epochs in done.items() if epochs.variance_kept < COLLAPSED}
    return RoundReport(
        steps=sum(epochs.steps for epochs in done.values()),
        metrics={
            step: {"loss": epochs.loss, "variance_kept": epochs.variance_kept}
            for step, epochs in done.items()
        },
        note="; ".join(notes),
    )
