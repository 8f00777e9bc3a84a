"""How many bytes had crossed when a metric first reached a value."""

from __future__ import annotations

from vfl.report.reading import RunRecord, history
from vfl.report.rounds import RoundLine
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError


def bytes_to(
    run: RunRecord, recipe: Recipe, metric: str, value: float, split: str = "validation"
) -> int | None:
    """Returns the message bytes of the run until ``metric`` was first at ``value`` or better; None
    if it never was (SS-VFL, Table 1).

    They are what the parties had sent at the end of that round, and the averages of the server in
    the phases up to it. A phase of kind ``evaluate`` only measures: what it sends itself is left
    out. Raises InputError if no round has the metric, or a party's folder is not here.
    """
    from vfl_party.models.metrics import lower_is_better

    roles = {each.name: each.role for each in run.summary.parties if each.role != "server"}
    rounds = {name: _rounds(run, name) for name in roles}
    active = rounds[next(name for name, role in roles.items() if role == "active")]
    if not any(metric in each.metrics.get(split, {}) for each in active):
        there = sorted(
            {f"{s} {n}" for each in active for s, ns in each.metrics.items() for n in ns}
        )
        text = f"{run.folder}: no round has {metric} of {split} rows"
        raise InputError(
            Code.CONFIG_INVALID, f"{text}; there are: {', '.join(there) or 'no metrics'}"
        )
    sign = -1 if lower_is_better(recipe.task, metric) else 1
    measuring = {each.name for each in recipe.phases if each.kind == "evaluate"}
    # The last round that trained, for each round.
    trained: RoundLine | None = None
    for each in active:
        trained = trained if each.phase in measuring else each
        found = each.metrics.get(split, {}).get(metric)
        if found is not None and sign * found >= sign * value:
            return 0 if trained is None else _until(run, recipe, rounds, trained)
    return None


def _rounds(run: RunRecord, name: str) -> list[RoundLine]:
    rounds = history(run.folder / name)
    if not rounds:
        text = f"{run.folder}: the rounds of {name} are not in it, and its bytes are asked for"
        raise InputError(Code.FILE_INVALID, f"{text}; copy the folder of each party into it")
    return rounds


def _until(
    run: RunRecord, recipe: Recipe, rounds: dict[str, list[RoundLine]], last: RoundLine
) -> int:
    """Returns the bytes at the end of a round."""
    order = [each.name for each in recipe.phases]
    phases = order[: order.index(last.phase) + 1]
    end = len(phases) - 1, last.round
    sent = 0.0
    for own in rounds.values():
        done = [each for each in own if (order.index(each.phase), each.round) <= end]
        sent += done[-1].values["bytes/sent"] if done else 0.0
    roles = {each.name: each.role for each in run.summary.parties}
    averages = sum(
        each.message_bytes
        for each in run.summary.bytes.by_link
        if roles.get(each.sender) == "server" and each.phase in phases
    )
    return int(sent) + averages
