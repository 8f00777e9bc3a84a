"""What a cell shows of a run, beside the metric of its test rows."""

from __future__ import annotations

from collections.abc import Callable

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
    return _minutes(seen, max)


def minutes_split_in_turn(seen: Seen) -> float:
    """Returns ``minutes_by_itself``, but in split training the passive parties compute one after
    the other.
    """
    return _minutes(seen, sum)


def _minutes(seen: Seen, of_split: Callable[[list[float]], float]) -> float:
    """Returns the minutes of training. ``of_split``: the passive parties' share of split training,
    from the seconds of each.
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
        # Split training takes turns; what is local goes on at the same time.
        if together:
            total += of_split(passive or [0.0]) + sum(active)
        else:
            total += max(*passive, *active, 0.0)
    return total / 60


def megabytes(seen: Seen) -> float:
    """Returns the message bytes of training, without those of validation and evaluation, in MiB,
    as SS-VFL's Table 1 counts them. Of split training each gradient counts twice: an embedding is
    as large as its gradient.
    """
    return sum(_training_bytes(each) for each in _summaries(seen)) / 2**20


def _training_bytes(summary: Summary) -> int:
    links = [each for each in summary.bytes.by_link if each.phase != "evaluate"]
    split = {each.phase for each in links if each.kind == "gradient"}
    once = sum(
        each.message_bytes for each in links if each.kind in _TRAINED and each.phase not in split
    )
    return once + 2 * sum(each.message_bytes for each in links if each.kind == "gradient")


def megabytes_to(target: float) -> Measure:
    """Returns a measure: the MiB of training until the validation rows first have the metric, or
    that of the data set's setting ``target_metric``; None if they never have it.

    What is sent once counts whole. Of split training each step counts as embedding and gradient.
    """

    def measure(seen: Seen) -> float | None:
        summary, metric = seen.summary, seen.settings.get("target_metric", seen.metric)
        phases = {link.phase for link in summary.bytes.by_link if link.kind == "gradient"}
        if not phases:
            reached = seen.result.metrics.get("validation", {}).get(metric, 0.0) >= target
            return megabytes(seen) if reached else None
        (phase,) = phases
        active = next(party.name for party in summary.parties if party.role == "active")
        a_step = studies.step_bytes(seen.folder, summary, phase, metric, active)
        curve = studies.curve(seen.folder, phase, metric, active=active)
        steps = next((steps for steps, value in curve if value >= target), None)
        return None if steps is None else a_step * steps / 2**20

    return measure
