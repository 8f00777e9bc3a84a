"""What a run would spend, by what its phases declare, before anything runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache

from vfl_common.bundle import BundleSpec
from vfl_party.base.mechanism import Mechanism
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Exchange, Occurrence, Sent
from vfl_party.phases.context import Party
from vfl_party.policy.planned import MAX_STEPS, get_sent, occurrences, receivers

# Splits that have no row in common.
_APART = ("train", "validation", "test")
# Exchanges of trees with one bit for each row of a node, or for each row and tree.
_PARTITION, _WALK = "partition", "walk"


@dataclass
class PlannedDisclosure:
    """What a run would send one peer. ``amounts``: by the key of the limit; for limits of a person,
    the maximum. ``costs``: how often each mechanism would be used about a person.
    """

    amounts: Counter[str] = field(default_factory=Counter)
    costs: Counter[Mechanism] = field(default_factory=Counter)

    def add(self, other: PlannedDisclosure, times: int) -> None:
        """Adds what another run sends, so many times."""
        self.amounts.update({key: times * value for key, value in other.amounts.items()})
        self.costs.update({key: times * value for key, value in other.costs.items()})


def plan_disclosures(party: Party, rows: int, job: str) -> dict[str, PlannedDisclosure] | None:
    """Returns {peer: what the run would send it}, as far as phases declare it; None if they declare
    too many steps to be counted, or follow from the rows of others.

    Which rows a batch has is not known, so a person counts as often as the rows of a round go into
    those of the split that they fit best. What leaves is counted exactly.

    Args:
        party: before it joins.
        rows: of its table.
    """
    plans: dict[str, PlannedDisclosure] = defaultdict(PlannedDisclosure)
    if party.awaits_sizes:
        # The number of the others' rows is known when all have joined.
        return None
    if job != "train":
        sides = [
            (occurrence.exchange, occurrence.chains) for occurrence in party.exchanges.values()
        ]
        return of_prediction(party, sides, rows)
    people = _People(party, rows, plans)
    for number, occurrence in enumerate(occurrences(party, rows)):
        if number == MAX_STEPS:
            return None
        people.count(occurrence)
    people.finish()
    if party.recipe.rows.align == "psi" and party.recipe.rows.alignment is None:
        for peer in plans:
            plans[peer].amounts["alignments"] += 1
    _private_training(party, plans)
    return dict(plans)


def _private_training(party: Party, plans: dict[str, PlannedDisclosure]) -> None:
    """Adds this party's steps, at all others."""
    plan, name = party.privacy, party.name
    others = [other.name for other in party.recipe.parties if other.name != name]
    if party.data.label_noise is not None:
        for other in others:
            plans[other].costs[party.data.label_noise] += 1
    if plan is None:
        return
    for share in (share for share in plan.shares if share.party == name):
        for other in others:
            plans[other].costs[plan.cost(share.spending)] += share.spending.steps


def of_prediction(
    party: Party, exchanges: Iterable[tuple[Exchange, Chains]], rows: int
) -> dict[str, PlannedDisclosure]:
    """Returns {peer: what a joint prediction would send it}: each row once in each exchange."""
    plans: dict[str, PlannedDisclosure] = defaultdict(PlannedDisclosure)
    for exchange, chains in exchanges:
        sent, up = get_sent(party, exchange)
        chain = chains.up if up else chains.down
        peers = (
            [party.recipe.active.name] if up else [party_.name for party_ in party.recipe.passives]
        )
        for peer in peers:
            amounts = plans[peer].amounts
            amounts["predictions"], amounts["predictions_of_a_person"] = rows, 1
            if sent.about_rows:
                width = {"rows": 1, "width": party.embedding_size}
                numbers, payload = _size(exchange, sent, chain, tuple(width.items()))
                amounts["numbers_of_a_person"] += numbers
                amounts["bytes_of_a_person"] += payload
                amounts["bytes"] += payload * rows
                if (cost := chain.costs) is not None:
                    times = cost.times * len(sent.tensors)
                    plans[peer].costs[replace(cost, times=times)] += 1
    return dict(plans)


class _People:
    """Adds occurrences up; ``found``: gets the sums."""

    def __init__(self, party: Party, rows: int, plans: dict[str, PlannedDisclosure]) -> None:
        self._party, self._found = party, plans
        splits = {name: len(of) for name, of in party.data.splits.items() if name in _APART}
        self._splits = {name: count for name, count in splits.items() if count} or {"": rows}
        # {(peer, phase, exchange, round): {(numbers, bytes, bits, costs of a row): rows}}.
        self._rounds: dict[tuple[str, str, str, int], Counter[_RowCost]] = defaultdict(Counter)
        self._chains = cache(self._party.chains)
        # The level of a tree: each level is about all rows once.
        self._level = 0

    def count(self, occurrence: Occurrence) -> None:
        """Adds an exchange at one step."""
        party, exchange = self._party, occurrence.exchange
        phase = occurrence.step.phase
        chains = self._chains(phase, exchange)
        sent, up = get_sent(party, exchange)
        chain = chains.up if up else chains.down
        known = dict(occurrence.sizes)
        of_a_row, rows = _RowCost(), known.get("rows", 0)
        if occurrence.empty == ("up" if up else "down"):
            return
        numbers, payload = _size(exchange, sent, chain, occurrence.sizes, phase)
        if sent.about_rows and rows:
            cost = chain.costs
            costs = replace(cost, times=cost.times * len(sent.tensors)) if cost else None
            of_a_row = _RowCost(-(-numbers // rows), -(-payload // rows), 0, costs)
        elif exchange.name == _PARTITION and up:
            self._level = occurrence.step.batch
            rows, of_a_row = max(self._splits.values()), _RowCost(1, 1, 1)
        elif exchange.name == _WALK and up:
            # The walk of some rows begins with nothing.
            self._level = self._level + 1 if known["packed"] else 0
            rows, of_a_row = known["packed"] * 8 // known["trees"], _RowCost(1, 1, known["trees"])
        for peer in receivers(party, occurrence, up=up):
            self._found[peer].amounts["bytes"] += payload
            if of_a_row != _RowCost() and rows:
                way = f"{exchange.name} {self._level}" if of_a_row.bits else exchange.name
                self._rounds[peer, phase, way, occurrence.step.round][of_a_row] += rows

    def finish(self) -> None:
        """Adds, at each peer, the largest sums of any person."""
        by_split: dict[tuple[str, str], PlannedDisclosure] = defaultdict(PlannedDisclosure)
        for (peer, *_), of_rows in self._rounds.items():
            rows = sum(of_rows.values())
            fitting = [count for count in self._splits.values() if count >= rows]
            split_rows = min(fitting) if fitting else max(self._splits.values())
            times = -(-rows // split_rows)
            splits = [
                name for name, count in self._splits.items() if not fitting or count == split_rows
            ]
            # All rows of a round are of one kind, but for the last ones.
            row = max(of_rows, key=lambda kind: (kind.bits, kind.numbers))
            for split in splits:
                plan = by_split[peer, split]
                plan.amounts["numbers_of_a_person"] += times * row.numbers
                plan.amounts["bytes_of_a_person"] += times * row.bytes
                plan.amounts["split_bits"] += times * row.bits
                if row.costs is not None:
                    plan.costs[row.costs] += times
        for (peer, _), plan in by_split.items():
            self._found[peer].amounts |= plan.amounts
            self._found[peer].costs |= plan.costs


@dataclass(frozen=True)
class _RowCost:
    numbers: int = 0
    bytes: int = 0
    bits: int = 0
    costs: Mechanism | None = None


def _size(
    exchange: Exchange,
    sent: Sent,
    chain: Chain,
    sizes: tuple[tuple[str, int], ...],
    phase: str = "",
) -> tuple[int, int]:
    """Returns the numbers and the payload bytes of what is sent."""
    spec = exchange.spec(sent, phase, dict(sizes))
    numbers = sum(_elements(tensor.shape) for tensor in spec.tensors.values())
    wire: BundleSpec = chain.wire_spec(spec)
    return numbers, wire.payload_bytes


def _elements(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
