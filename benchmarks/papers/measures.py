"""What a cell shows of a run, beside the metric of its test rows."""

from __future__ import annotations

from benchmarks import studies
from benchmarks.papers.describe import Measure, Seen
from vfl_common.summary import Summary, load_summary

_TRAINED = ("embedding", "gradient", "weights")


def _summaries(seen: Seen) -> list[Summary]:
    """Returns the summaries of a run and of the pretraining it started from."""
    first = seen.result.pretrain.run
    before = [load_summary(seen.folder.parent / first / "summary.json")] if first else []
    return [*before, seen.summary]


def minutes_by_itself(seen: Seen) -> float:
    """Returns the minutes of training if each party had a machine of its own: the active party's
    computing, and that of the passive party that computes most.
    """
    total = 0.0
    for summary in _summaries(seen):
        busy = {
            party.name: sum(each.compute_s for each in party.times if each.phase != "evaluate")
            for party in summary.parties
            if party.role != "server"
        }
        roles = {party.name: party.role for party in summary.parties}
        passive = [busy[name] for name, role in roles.items() if role == "passive"]
        active = [busy[name] for name, role in roles.items() if role == "active"]
        together = any(link.kind == "gradient" for link in summary.bytes.by_link)
        most = [max(passive, default=0.0), sum(active)]
        # Split training takes turns; what is local goes on at the same time.
        total += sum(most) if together else max(most)
    return total / 60


def megabytes(seen: Seen) -> float:
    """Returns the message bytes of training, without those of evaluation, in MB."""
    found = sum(
        link.message_bytes
        for summary in _summaries(seen)
        for link in summary.bytes.by_link
        if link.kind in _TRAINED and link.phase != "evaluate"
    )
    return found / 1e6


def megabytes_to(target: float) -> Measure:
    """Returns a measure: the MB of training until the validation rows first have the metric; None
    if they never have it.

    What is sent once counts whole. Of split training each step counts as embedding and gradient.
    """

    def measure(seen: Seen) -> float | None:
        summary = seen.summary
        phases = {link.phase for link in summary.bytes.by_link if link.kind == "gradient"}
        if not phases:
            reached = seen.result.metrics.get("validation", {}).get(seen.metric, 0.0) >= target
            return megabytes(seen) if reached else None
        (phase,) = phases
        active = next(party.name for party in summary.parties if party.role == "active")
        a_step = studies.step_bytes(seen.folder, summary, phase, seen.metric, active)
        curve = studies.curve(seen.folder, phase, seen.metric, active=active)
        steps = next((steps for steps, value in curve if value >= target), None)
        return None if steps is None else a_step * steps / 1e6

    return measure
