"""Plans what a party sends in a run, from the declarations of its phases, before anything runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from vfl_party.align import alignment_of
from vfl_party.outbound.declared import Exchange, Occurrence, Sent
from vfl_party.phases.context import Party

# Splits that have no row in common.
_APART = ("train", "validation", "test")
# Steps of a run; counting more takes longer than people wait.
MAX_STEPS = 1_000_000


@dataclass
class SendingPlan:
    """What a party plans to send.

    ``payload_bytes``: to all. ``numbers``: {peer: the maximum about one person}. ``batches``:
    {(phase, exchange): the minimum rows of a batch that is disclosed row by row}.
    """

    payload_bytes: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    batches: dict[tuple[str, str], int] = field(default_factory=dict)


def plan_sent(party: Party, rows: int) -> SendingPlan | None:
    """Returns what the party sends, as far as its phases declare it; None if they declare too many
    steps to be counted, or if how many rows the others hold is not known yet.

    The rows of a batch are not known, and rounds are taken to go through the rows of a split; what
    leaves is counted exactly.

    Args:
        party: before it joins.
        rows: of its table.
    """
    if party.awaits_sizes:
        return None
    plan, chains = SendingPlan(), cache(party.chains)
    phases = {entry.name for entry in party.course.phases}
    # {(peer, phase, exchange, round): (numbers about a row, rows)}.
    rounds: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    for number, occurrence in enumerate(occurrences(party, rows)):
        if number == MAX_STEPS:
            return None
        sent, up = get_sent(party, occurrence.exchange)
        to = receivers(party, occurrence, up=up)
        if not to or not sent.tensors or occurrence.empty == ("up" if up else "down"):
            continue
        phase, name = occurrence.step.phase, occurrence.exchange.name
        both = chains(phase, occurrence.exchange)
        spec = occurrence.exchange.spec(sent, phase, dict(occurrence.sizes))
        wire = (both.up if up else both.down).wire_spec(spec)
        plan.payload_bytes += wire.payload_bytes * len(to)
        batch = dict(occurrence.sizes).get("rows", 0)
        if not (sent.about_rows and batch) or phase not in phases:
            continue
        plan.batches[phase, name] = min(batch, plan.batches.get((phase, name), batch))
        width = -(-sum(math.prod(of.shape) for of in spec.tensors.values()) // batch)
        for peer in to:
            key = (peer, phase, name, occurrence.step.round)
            rounds[key] = (width, rounds.get(key, (0, 0))[1] + batch)
    _add_people(plan, party, max(1, rows), rounds)
    return plan


def _add_people(
    plan: SendingPlan,
    party: Party,
    rows: int,
    rounds: Mapping[tuple[str, str, str, int], tuple[int, int]],
) -> None:
    """Adds the numbers about a person: the rows of a round are taken to be those of the smallest
    split that has as many.
    """
    splits = sorted({len(party.data.splits.get(name, ())) for name in _APART} - {0})
    # {(peer, rows of the split)}; of all rows, None.
    sums: Counter[tuple[str, int | None]] = Counter()
    for (peer, *_), (width, rows_told) in rounds.items():
        split = next((size for size in splits if rows_told <= size), None)
        sums[peer, split] += width * -(-rows_told // (split or rows))
    for peer in {peer for peer, _ in sums}:
        of_a_split = max(sums[peer, split] for split in [*splits, 0])
        plan.numbers[peer] = of_a_split + sums[peer, None]


def occurrences(party: Party, rows: int) -> Iterator[Occurrence]:
    """Yields the exchanges of a run, with a table of ``rows`` rows."""
    yield from alignment_of(party.recipe).occurrences(rows)
    for phase in party.course.phases:
        traffic = phase.method.traffic(party, phase.name, phase.settings)
        if traffic is not None:
            yield from traffic.occurrences
            yield from traffic.after(None) if traffic.after is not None else ()


def get_sent(party: Party, exchange: Exchange) -> tuple[Sent, bool]:
    """Returns what this party sends in an exchange, and whether it is the one that asks."""
    up = party.role == "passive" or exchange.asks == "server"
    return (exchange.up if up else exchange.down), up


def receivers(party: Party, occurrence: Occurrence, *, up: bool) -> list[str]:
    """Returns who gets what this party sends."""
    recipe, exchange = party.recipe, occurrence.exchange
    asking = [other.name for other in recipe.passives]
    if occurrence.party is not None:
        asking = [occurrence.party] if isinstance(occurrence.party, str) else [*occurrence.party]
    if exchange.asks == "server":
        return [] if exchange.passive and party.role == "active" else [recipe.server]
    if not up:
        return asking
    return [recipe.active.name] if party.name in asking else []
