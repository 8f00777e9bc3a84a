"""Counts the bytes that a run had sent when a metric first reached a value."""

from __future__ import annotations

from vfl.report.reading import RunRecord, history
from vfl.report.rounds import RoundLine
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError


def bytes_to(
    run: RunRecord, recipe: Recipe, metric: str, value: float, split: str = "validation"
) -> int | None:
    """Returns the message bytes of the run until ``metric`` first reached ``value`` or better; None
    if it never did (SS-VFL, Table 1).

    They are the bytes that the parties had sent at the end of that round, and the averages of the
    server in the phases up to it. A phase of kind ``evaluate`` only measures: its own bytes are
    left out. Raises InputError if no round has the metric, or if a party's folder is missing.
    """
    from vfl_party.models.metrics import lower_is_better

    roles = {party.name: party.role for party in run.summary.parties if party.role != "server"}
    rounds = {name: _rounds(run, name) for name in roles}
    active = rounds[next(name for name, role in roles.items() if role == "active")]
    if not any(metric in line.metrics.get(split, {}) for line in active):
        names = sorted(
            {f"{s} {n}" for line in active for s, ns in line.metrics.items() for n in ns}
        )
        raise InputError(
            Code.CONFIG_INVALID,
            f"{run.folder}: no round has {metric} of {split} rows. Choose one of "
            f"{', '.join(names)}."
            if names
            else f"{run.folder}: no round has metrics. Use a run with a phase that measures them.",
        )
    sign = -1 if lower_is_better(recipe.task, metric) else 1
    measuring = {phase.name for phase in recipe.phases if phase.kind == "evaluate"}
    # The last round so far that trained.
    trained: RoundLine | None = None
    for line in active:
        trained = trained if line.phase in measuring else line
        reached = line.metrics.get(split, {}).get(metric)
        if reached is not None and sign * reached >= sign * value:
            return 0 if trained is None else _until(run, recipe, rounds, trained)
    return None


def _rounds(run: RunRecord, name: str) -> list[RoundLine]:
    rounds = history(run.folder / name)
    if not rounds:
        raise InputError(
            Code.FILE_INVALID,
            f"{run.folder}: does not contain the rounds of {name}, which are needed to count "
            "bytes. Copy the folder of each party into it.",
        )
    return rounds


def _until(
    run: RunRecord, recipe: Recipe, rounds: dict[str, list[RoundLine]], last: RoundLine
) -> int:
    """Returns the bytes that were sent until the end of a round."""
    order = [phase.name for phase in recipe.phases]
    phases = order[: order.index(last.phase) + 1]
    end = len(phases) - 1, last.round
    sent = 0.0
    for own in rounds.values():
        done = [line for line in own if (order.index(line.phase), line.round) <= end]
        sent += done[-1].values["bytes/sent"] if done else 0.0
    roles = {party.name: party.role for party in run.summary.parties}
    averages = sum(
        link.message_bytes
        for link in run.summary.bytes.by_link
        if roles.get(link.sender) == "server" and link.phase in phases
    )
    return int(sent) + averages
