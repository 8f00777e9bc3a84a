"""Computes the amounts that a run would spend, from the declarations of its phases."""

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
from vfl_party.policy.meeting import MAX_STEPS, get_sent, occurrences, receivers

# The splits that have no rows in common.
_APART = ("train", "validation", "test")
# The exchanges of trees that send one bit for each row of a node, or for each row and tree.
_PARTITION, _WALK = "partition", "walk"


@dataclass
class PlannedDisclosure:
    """The amounts that a run would send to one peer.

    ``amounts``: {key of a limit: amount}. For limits per person it is the maximum over people.
    ``costs``: {mechanism: number of its uses about a person}.
    """

    amounts: Counter[str] = field(default_factory=Counter)
    costs: Counter[Mechanism] = field(default_factory=Counter)

    def add(self, other: PlannedDisclosure, times: int) -> None:
        """Adds the amounts of another run ``times`` times."""
        self.amounts.update({key: times * value for key, value in other.amounts.items()})
        self.costs.update({key: times * value for key, value in other.costs.items()})


def plan_disclosures(party: Party, rows: int, job: str) -> dict[str, PlannedDisclosure] | None:
    """Returns {peer: amounts that the run would send to it}, as far as the phases declare them.

    Returns None if there are too many steps to count, or if the amounts depend on the number of
    rows at other parties. The rows of a batch are not known in advance. So this estimates how often
    a person occurs in a round from the number of rows in the round and in the best fitting split.
    During the run, everything is counted exactly.

    Args:
        party: The party before it joins.
        rows: The number of rows in its table.
        job: ``train`` or ``predict``.
    """
    plans: dict[str, PlannedDisclosure] = defaultdict(PlannedDisclosure)
    if party.awaits_sizes:
        # The number of rows at the other parties is only known after all have joined.
        return None
    if job != "train":
        sides = [
            (occurrence.exchange, occurrence.chains) for occurrence in party.exchanges.values()
        ]
        return of_prediction(party, sides, rows)
    people = _AmountCounter(party, rows, plans)
    for number, occurrence in enumerate(occurrences(party, rows)):
        if number == MAX_STEPS:
            return None
        people.count(occurrence)
    people.finish()
    if party.recipe.rows.align == "psi" and party.recipe.rows.alignment is None:
        for peer in plans:
            plans[peer].amounts["alignments"] += 1
    _add_private_training(party, plans)
    return dict(plans)


def _add_private_training(party: Party, plans: dict[str, PlannedDisclosure]) -> None:
    """Adds the costs of this party's differentially private training for all other parties."""
    plan, name = party.privacy, party.name
    other_parties = [other.name for other in party.recipe.parties if other.name != name]
    if party.data.label_noise is not None:
        for other in other_parties:
            plans[other].costs[party.data.label_noise] += 1
    if plan is None:
        return
    for share in (share for share in plan.shares if share.party == name):
        for other in other_parties:
            plans[other].costs[plan.cost(share.spending)] += share.spending.steps


def of_prediction(
    party: Party, exchanges: Iterable[tuple[Exchange, Chains]], rows: int
) -> dict[str, PlannedDisclosure]:
    """Returns {peer: amounts that a joint prediction would send to it}.

    Each row is sent once in each exchange.
    """
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
                numbers, payload = _compute_size(exchange, sent, chain, tuple(width.items()))
                amounts["numbers_of_a_person"] += numbers
                amounts["bytes_of_a_person"] += payload
                amounts["bytes"] += payload * rows
                if (cost := chain.costs) is not None:
                    times = cost.times * len(sent.tensors)
                    plans[peer].costs[replace(cost, times=times)] += 1
    return dict(plans)


class _AmountCounter:
    """Adds up the amounts of exchanges into ``plans``."""

    def __init__(self, party: Party, rows: int, plans: dict[str, PlannedDisclosure]) -> None:
        self._party, self._plans = party, plans
        splits = {name: len(of) for name, of in party.data.splits.items() if name in _APART}
        self._splits = {name: count for name, count in splits.items() if count} or {"": rows}
        # {(peer, phase, exchange, round): {cost of a row: number of rows}}.
        self._rounds: dict[tuple[str, str, str, int], Counter[_RowCost]] = defaultdict(Counter)
        self._chains = cache(self._party.chains)
        # The current level of a tree. Each level has all rows once.
        self._level = 0

    def count(self, occurrence: Occurrence) -> None:
        """Adds the amounts of an exchange in one step."""
        party, exchange = self._party, occurrence.exchange
        phase = occurrence.step.phase
        chains = self._chains(phase, exchange)
        sent, up = get_sent(party, exchange)
        chain = chains.up if up else chains.down
        sizes = dict(occurrence.sizes)
        row_cost, rows = _RowCost(), sizes.get("rows", 0)
        if occurrence.empty == ("up" if up else "down"):
            return
        numbers, payload = _compute_size(exchange, sent, chain, occurrence.sizes, phase)
        if sent.about_rows and rows:
            cost = chain.costs
            costs = replace(cost, times=cost.times * len(sent.tensors)) if cost else None
            row_cost = _RowCost(-(-numbers // rows), -(-payload // rows), 0, costs)
        elif exchange.name == _PARTITION and up:
            self._level = occurrence.step.batch
            rows, row_cost = max(self._splits.values()), _RowCost(1, 1, 1)
        elif exchange.name == _WALK and up:
            # An empty message begins the walk through the levels of the trees.
            self._level = self._level + 1 if sizes["packed"] else 0
            rows, row_cost = sizes["packed"] * 8 // sizes["trees"], _RowCost(1, 1, sizes["trees"])
        for peer in receivers(party, occurrence, up=up):
            self._plans[peer].amounts["bytes"] += payload
            if row_cost != _RowCost() and rows:
                exchange_name = f"{exchange.name} {self._level}" if row_cost.bits else exchange.name
                self._rounds[peer, phase, exchange_name, occurrence.step.round][row_cost] += rows

    def finish(self) -> None:
        """Adds the maximum amounts per person for each peer."""
        by_split: dict[tuple[str, str], PlannedDisclosure] = defaultdict(PlannedDisclosure)
        for (peer, *_), rows_by_cost in self._rounds.items():
            rows = sum(rows_by_cost.values())
            fitting = [count for count in self._splits.values() if count >= rows]
            split_rows = min(fitting) if fitting else max(self._splits.values())
            times = -(-rows // split_rows)
            splits = [
                name for name, count in self._splits.items() if not fitting or count == split_rows
            ]
            # All rows of a round have the same cost, except in the last batch.
            row = max(rows_by_cost, key=lambda kind: (kind.bits, kind.numbers))
            for split in splits:
                plan = by_split[peer, split]
                plan.amounts["numbers_of_a_person"] += times * row.numbers
                plan.amounts["bytes_of_a_person"] += times * row.bytes
                plan.amounts["split_bits"] += times * row.bits
                if row.costs is not None:
                    plan.costs[row.costs] += times
        for (peer, _), plan in by_split.items():
            self._plans[peer].amounts |= plan.amounts
            self._plans[peer].costs |= plan.costs


@dataclass(frozen=True)
class _RowCost:
    numbers: int = 0
    bytes: int = 0
    bits: int = 0
    costs: Mechanism | None = None


def _compute_size(
    exchange: Exchange,
    sent: Sent,
    chain: Chain,
    sizes: tuple[tuple[str, int], ...],
    phase: str = "",
) -> tuple[int, int]:
    """Returns the count of numbers and the payload bytes of a bundle."""
    spec = exchange.spec(sent, phase, dict(sizes))
    numbers = sum(_count_elements(tensor.shape) for tensor in spec.tensors.values())
    wire: BundleSpec = chain.wire_spec(spec)
    return numbers, wire.payload_bytes


def _count_elements(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
