"""Computes what a party would send in a run, from the declarations of its phases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from vfl_party.align import make_alignment
from vfl_party.outbound.declared import Exchange, Occurrence, Sent
from vfl_party.phases.context import Party

# The splits that have no rows in common.
_APART = ("train", "validation", "test")
# The maximum number of steps that are counted, because counting more takes too long.
MAX_STEPS = 1_000_000


@dataclass
class SendingPlan:
    """What a party would send in a run.

    Args:
        payload_bytes: The number of bytes to all receivers together.
        numbers: {peer: maximum count of numbers about one person}.
        batches: {(phase, exchange): minimum number of rows in a batch with values for each row}.
    """

    payload_bytes: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    batches: dict[tuple[str, str], int] = field(default_factory=dict)


def plan_sent(party: Party, rows: int) -> SendingPlan | None:
    """Returns what the party would send in a run, as far as its phases declare it.

    Returns None if there are too many steps to count, or if it depends on the unknown number of
    rows at other parties. The rows of a batch are not known in advance, so this assumes that a
    round goes through the rows of one split. During the run, everything is counted exactly.

    Args:
        party: The party before it joins.
        rows: The number of rows in its table.
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
        both_chains = chains(phase, occurrence.exchange)
        spec = occurrence.exchange.spec(sent, phase, dict(occurrence.sizes))
        wire = (both_chains.up if up else both_chains.down).wire_spec(spec)
        plan.payload_bytes += wire.payload_bytes * len(to)
        batch = dict(occurrence.sizes).get("rows", 0)
        if not (sent.about_rows and batch) or phase not in phases:
            continue
        plan.batches[phase, name] = min(batch, plan.batches.get((phase, name), batch))
        width = -(-sum(math.prod(tensor.shape) for tensor in spec.tensors.values()) // batch)
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
    """Adds the maximum count of numbers about one person for each peer.

    It assumes that the rows of a round are those of the smallest split that is large enough.
    """
    splits = sorted({len(party.data.splits.get(name, ())) for name in _APART} - {0})
    # {(peer, rows of the split or None for all rows): count of numbers about one person}.
    sums: Counter[tuple[str, int | None]] = Counter()
    for (peer, *_), (width, row_count) in rounds.items():
        split = next((size for size in splits if row_count <= size), None)
        sums[peer, split] += width * -(-row_count // (split or rows))
    for peer in {peer for peer, _ in sums}:
        max_of_split = max(sums[peer, split] for split in [*splits, 0])
        plan.numbers[peer] = max_of_split + sums[peer, None]


def occurrences(party: Party, rows: int) -> Iterator[Occurrence]:
    """Yields all occurrences of exchanges in a run with a table of ``rows`` rows."""
    yield from make_alignment(party.recipe).occurrences(rows)
    for phase in party.course.phases:
        traffic = phase.method.traffic(party, phase.name, phase.settings)
        if traffic is not None:
            yield from traffic.occurrences
            yield from traffic.after(None) if traffic.after is not None else ()


def get_sent(party: Party, exchange: Exchange) -> tuple[Sent, bool]:
    """Returns what this party sends in an exchange, and whether it sends the request."""
    up = party.role == "passive" or exchange.asks == "server"
    return (exchange.up if up else exchange.down), up


def receivers(party: Party, occurrence: Occurrence, *, up: bool) -> list[str]:
    """Returns the names of the receivers of what this party sends in an exchange."""
    recipe, exchange = party.recipe, occurrence.exchange
    asking = [other.name for other in recipe.passives]
    if occurrence.party is not None:
        asking = [occurrence.party] if isinstance(occurrence.party, str) else [*occurrence.party]
    if exchange.asks == "server":
        return [] if exchange.passive and party.role == "active" else [recipe.server]
    if not up:
        return asking
    return [recipe.active.name] if party.name in asking else []
