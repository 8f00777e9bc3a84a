"""Enforces the limits of an account before a run starts and before each bundle is sent."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import BundleSpec
from vfl_common.config.party import PartyFile
from vfl_common.config.policy import AccountLimits, PolicySettings
from vfl_common.errors import Code, InputError
from vfl_common.psi import PHASE
from vfl_common.run_folder import RunFolder
from vfl_common.text import count
from vfl_governance.account.store import Standing, standing
from vfl_governance.account.sums import (
    OF_A_PERSON,
    OF_ALL,
    AccountSums,
    People,
    Persons,
    tag_ids,
    worst,
)
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import OpenedParty
from vfl_party.base.mechanism import Mechanism
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Exchange, Occurrence, Sent
from vfl_party.phases.context import Party, find_privacy
from vfl_party.policy.guards import InstalledGuard, ServingGuard
from vfl_party.policy.meeting import MAX_STEPS, ProposedRun, get_sent, occurrences, receivers
from vfl_party.predict.prediction import exchanges_of
from vfl_party.record.book import LINES, RecordBook, folder_of, secret_of
from vfl_party.record.history import Disclosure, PrivateStep, RecordReader

_AMOUNTS = {
    "epsilon": "an ε of {} for one person is spent",
    "numbers_of_a_person": "{} numbers about one person are spent",
    "bytes_of_a_person": "{} bytes about one person are spent",
    "bytes": "{} bytes are spent",
    "split_bits": "{} bits of splits about one person are spent",
    "alignments": "{} alignments are spent",
    "predictions": "{} predicted rows are spent",
    "predictions_of_a_person": "{} predictions of one person are spent",
    "asked": "{} ids were asked for",
}


log = logging.getLogger(__name__)


def limits_of(file: PartyFile) -> AccountLimits:
    """Returns the account limits of a party file. Without a table ``policy`` it has no limits."""
    return file.policy.account if isinstance(file.policy, PolicySettings) else AccountLimits()


def guard_of(
    book: RecordBook, limits: AccountLimits, *, resumes: bool = False
) -> AccountGuard | None:
    """Returns the guard that enforces the limits in a run, or None if there are no limits.

    ``resumes``: Whether the run resumes a run that was already checked when it began. Raises
    InputError if the account cannot be used.
    """
    if not limits.amounts:
        return None
    return AccountGuard(standing(book.folder), limits, book.secret, resumes=resumes)


def make_run_guard(
    files: PartyFiles,
    book: RecordBook,
    *,
    resume: RunFolder | None,
    trained: Path | None,  # noqa: ARG001 - see GuardFactory
) -> AccountGuard | None:
    """Returns the guard of a run, or None if there are no limits. A resumed run was already checked
    when it began.
    """
    return guard_of(book, limits_of(files.file), resumes=resume is not None)


def make_serving_guard(file: PartyFile, book: RecordBook) -> AccountGuard | None:
    """Returns the guard of a program that serves, or None if there are no limits."""
    return guard_of(book, limits_of(file))


def make_check_guard(files: PartyFiles) -> AccountGuard | None:
    """Returns the guard for a check before a run, or None if there are no limits.

    The party may not have a record yet, and this does not create one. Raises InputError if the
    account cannot be used.
    """
    file = files.file
    limits, folder = limits_of(file), folder_of(Path(file.record.folder or file.out), file.name)
    if not limits.amounts:
        return None
    if not (folder / LINES).is_file():
        no_sums = AccountSums(Persons(folder))
        return AccountGuard(Standing(folder, no_sums, RecordReader()), limits, b"")
    return AccountGuard(standing(folder), limits, secret_of(folder))


@dataclass(frozen=True)
class Balance:
    """A limit for a peer, the amount that is ``spent``, and the amount ``after`` more runs."""

    key: str
    peer: str
    limit: float
    spent: float
    after: float

    @property
    def passes(self) -> bool:
        """Whether these runs would exceed the limit."""
        return self.after > self.limit and self.after > self.spent

    def words(self, runs: int, predictions: int) -> str:
        """Returns a sentence about this limit for a number of runs and predicted rows."""
        is_total = self.key in OF_ALL
        predicted = [
            count(predictions, "predicted row") if is_total else "one prediction of each person"
        ]
        additions = [*([count(runs, "run")] if runs else []), *(predicted if predictions else [])]
        over = ", which exceeds the limit" if self.passes else ""
        return (
            f"policy.account.{self.key} = {_format_number(self.limit)}: "
            f"{_AMOUNTS[self.key].format(_format_number(self.spent))} at {self.peer}, and "
            f"{' and '.join(additions)} would make it {_format_number(self.after)}{over}"
        )


class AccountGuard(InstalledGuard, ServingGuard):
    """Enforces the limits in a run, or in a program that serves.

    It is also the check of a ``Recorder`` for each bundle. Before each check it reads new lines of
    the record, so that it also counts what other programs of the party have sent.
    """

    key = "account"

    def __init__(
        self, standing: Standing, limits: AccountLimits, secret: bytes, *, resumes: bool = False
    ) -> None:
        self._standing, self._limits, self._amounts = standing, limits, limits.amounts
        self._secret, self._resumes = secret, resumes
        # A party may serve several runs at the same time.
        self._lock = threading.Lock()

    def before(self, proposed: ProposedRun) -> None:
        """Raises InputError (REFUSED) if the planned run would exceed a limit."""
        if self._resumes:
            return
        opened = proposed.opened
        if opened.settings.spelt_by_recipe:
            rules = ", ".join(f'"{rule}"' for rule in opened.recipe.rows.id_rules)
            raise InputError(
                Code.REFUSED,
                "policy.account: counts people by their ids, but this recipe changes the form of "
                f"ids. Write data.id_rules = [{rules}] in the party file, so that every recipe "
                "gives a person the same id.",
            )
        plan = plan_disclosures(proposed.party, len(opened.table), opened.work.job)
        if plan is None:
            # The limits are still enforced for each bundle.
            log.info(
                "the amounts of this run are not known before it starts; each bundle is counted",
                extra={"event": "account"},
            )
            return
        self.check(tag_ids(self._secret, opened.table.ids), plan)

    @property
    def leave_check(self) -> AccountGuard:
        """The check of each bundle."""
        return self

    def __call__(self, line: Disclosure | PrivateStep) -> None:
        """Raises InputError (REFUSED) if a bundle or step would exceed a limit for a receiver."""
        with self._lock:
            self._require_within(line)

    def wrote(self, line: Disclosure | PrivateStep, begin: int, end: int) -> None:
        """Adds the written line to the account."""
        with self._lock:
            self._standing.take(line, begin, end)

    def may_predict(self, ids: Sequence[str], peer: str, run: str) -> npt.NDArray[np.bool_]:
        """Returns for each id whether the limits of predictions allow an answer to a peer, bool
        [N].

        So only the people who were predicted too often are refused.
        """
        max_per_person = self._amounts.get("predictions_of_a_person")
        max_total = self._amounts.get("predictions")
        allowed = np.ones(len(ids), bool)
        if not len(ids) or (max_per_person is None and max_total is None):
            return allowed
        with self._lock:
            self._standing.catch_up()
            sums, tags = self._standing.sums, tag_ids(self._secret, ids)
            person_numbers = sums.persons.numbers(tags)
            peers = self._get_counted_peers(peer)
            if max_per_person is not None:
                spent = _sum_vectors(sums, peers, "predictions_of_a_person")
                # An id that occurs twice in the request counts twice.
                earlier = _count_earlier(tags)
                before = (
                    np.where(person_numbers >= 0, spent[np.maximum(person_numbers, 0)], 0)
                    if len(spent)
                    else 0
                )
                allowed = before + earlier < max_per_person
            if max_total is not None:
                person = (
                    sums.runs[peer, run].person
                    if (peer, run) in sums.runs
                    else person_numbers.max()
                )
                total = _sum_totals(sums, peers, sums.data_set(int(person)), "predictions")
                allowed &= np.cumsum(allowed) <= max_total - total
        return allowed

    def _require_within(self, line: Disclosure | PrivateStep) -> None:
        self._standing.catch_up()
        sums = self._standing.sums
        receivers = list(dict.fromkeys(line.to))
        # If limits count all peers together, a bundle counts once for each receiver.
        times = len(receivers) if self._limits.together else 1
        for peer in receivers:
            added, peers = sums.compute_added(line, peer), self._get_counted_peers(peer)
            for key in OF_A_PERSON:
                if key in self._amounts and key in added.people:
                    person_numbers, amounts = added.people[key]
                    before = _sum_vectors(sums, peers, key)[person_numbers]
                    after = before + times * amounts
                    if len(person_numbers) and after.max() > self._amounts[key]:
                        worst_index = int(after.argmax())
                        self._refuse_bundle(
                            key,
                            peer,
                            int(before[worst_index]),
                            int(after[worst_index] - before[worst_index]),
                        )
            for key in OF_ALL:
                total_amount = times * added.run.get(key, 0)
                if key in self._amounts and total_amount:
                    data_set = sums.data_set(sums.runs[peer, _run_id(line)].person)
                    total = _sum_totals(sums, peers, data_set, key)
                    if total + total_amount > self._amounts[key]:
                        self._refuse_bundle(key, peer, total, total_amount)
            self._check_epsilon(sums, peer, added.people, times)

    def _get_counted_peers(self, peer: str) -> list[str]:
        """Returns the peers whose amounts are added up for a limit for ``peer``."""
        if not self._limits.together:
            return [peer]
        return list(dict.fromkeys([*self._standing.sums.peers, peer]))

    def check(self, people: npt.NDArray[np.void], plan: Mapping[str, PlannedDisclosure]) -> None:
        """Raises InputError (REFUSED) if a planned run would exceed a limit.

        Args:
            people: The tags of the people in the table.
            plan: {peer: what the run would send to it}.
        """
        for balance in self._compute_balances(people, plan):
            if balance.passes:
                raise InputError(
                    Code.REFUSED,
                    f"policy.account.{balance.key} = {balance.limit} in the party file: "
                    f"{_AMOUNTS[balance.key].format(_format_number(balance.spent))} at "
                    f"{balance.peer}, and this run would add "
                    f"{_format_number(balance.after - balance.spent)}. Raise the limit, or reduce "
                    "the run.",
                )

    def balances(
        self, opened: OpenedParty, party: Party, runs: int, predictions: int = 0
    ) -> list[Balance]:
        """Returns the balance of each limit after a number of runs and predicted rows.

        It assumes one prediction of each person, because repeated predictions are not known in
        advance. Returns an empty list if the amounts of a run cannot be planned.
        """
        total_plan: dict[str, PlannedDisclosure] = defaultdict(PlannedDisclosure)
        plan = plan_disclosures(party, len(opened.table), "train") if runs else {}
        if plan is None:
            return []
        for peer, run_plan in plan.items():
            total_plan[peer].add(run_plan, runs)
        if predictions:
            for peer, prediction_plan in of_prediction(
                party, exchanges_of(party), predictions
            ).items():
                total_plan[peer].add(prediction_plan, 1)
        return [*self._compute_balances(tag_ids(self._secret, opened.table.ids), total_plan)]

    def _compute_balances(
        self, people: npt.NDArray[np.void], plan: Mapping[str, PlannedDisclosure]
    ) -> Iterator[Balance]:
        self._standing.catch_up()
        sums, limits = self._standing.sums, self._limits
        person_numbers = sums.persons.find(people)
        sets = np.unique(sums.persons.sets[person_numbers])
        if limits.together and plan:
            total_plan = PlannedDisclosure()
            for peer_plan in plan.values():
                total_plan.add(peer_plan, 1)
            plan = {" and ".join(plan): total_plan}
        for peer, planned_ in plan.items():
            peers = self._get_counted_peers(peer)
            for what, limit in limits.amounts.items():
                if what == "epsilon":
                    spent, after = _compute_epsilons(
                        sums, peers, person_numbers, planned_, limits.delta
                    )
                else:
                    spent = (
                        int(_sum_vectors(sums, peers, what)[person_numbers].max(initial=0))
                        if what in OF_A_PERSON
                        else sum(_sum_totals(sums, peers, int(data_set), what) for data_set in sets)
                    )
                    after = spent + planned_.amounts[what]
                yield Balance(what, peer, limit, spent, after)

    def _check_epsilon(self, sums: AccountSums, peer: str, added: People, receivers: int) -> None:
        if self._limits.epsilon is None:
            return
        for what, (person_numbers, uses) in added.items():
            if not what.startswith("cost "):
                continue
            new = Mechanism.read(what.removeprefix("cost "))
            sums.vector(peer, what)
            before = [
                (mechanism, times[person_numbers])
                for mechanism, times in _yield_costs(sums, self._get_counted_peers(peer))
            ]
            after = [
                (mechanism, times + receivers * uses * (mechanism == new))
                for mechanism, times in before
            ]
            total = worst(after, self._limits.delta)
            if total > self._limits.epsilon:
                spent = worst(before, self._limits.delta)
                self._refuse_bundle("epsilon", peer, spent, total - spent)

    def _refuse_bundle(self, what: str, peer: str, spent: float, more: float) -> None:
        raise InputError(
            Code.REFUSED,
            f"policy.account.{what} = {self._amounts[what]} in the party file: "
            f"{_AMOUNTS[what].format(_format_number(spent))} at {peer}, and the next bundle would "
            f"add {_format_number(more)}; it was not sent. Raise the limit to send it.",
        )


def _sum_vectors(sums: AccountSums, peers: Sequence[str], what: str) -> npt.NDArray[np.int64]:
    """Returns the amounts of all people, added up over some peers, int64 [P]."""
    sums_: npt.NDArray[np.int64] = np.sum([sums.vector(peer, what) for peer in peers], axis=0)
    return sums_


def _sum_totals(sums: AccountSums, peers: Sequence[str], data_set: int, what: str) -> int:
    return sum(sums.total(peer, data_set)[what] for peer in peers)


def _yield_costs(
    sums: AccountSums, peers: Sequence[str]
) -> Iterator[tuple[Mechanism, npt.NDArray[np.int64]]]:
    """Yields each mechanism with the number of its uses about each person, int64 [P].

    The uses are added up over some peers.
    """
    totals: dict[Mechanism, npt.NDArray[np.int64]] = {}
    for peer in peers:
        for mechanism, times in sums.costs(peer):
            totals[mechanism] = totals[mechanism] + times if mechanism in totals else times
    yield from totals.items()


def _compute_epsilons(
    sums: AccountSums,
    peers: Sequence[str],
    person_numbers: npt.NDArray[np.int64],
    plan: PlannedDisclosure,
    delta: float,
) -> tuple[float, float]:
    """Returns the greatest ε of these people before and after the planned run."""
    before = {mechanism: times[person_numbers] for mechanism, times in _yield_costs(sums, peers)}
    no_uses = np.zeros(max(1, len(person_numbers)), np.int64)
    # New people have spent nothing, but the run has a cost for them, too.
    uses_before = {
        mechanism: times if len(times) else no_uses for mechanism, times in before.items()
    }
    after = dict(uses_before)
    for mechanism, times_ in plan.costs.items():
        after[mechanism] = after.get(mechanism, no_uses) + times_
    return worst([*uses_before.items()], delta), worst([*after.items()], delta)


def _count_earlier(tags: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Returns for each tag how often it occurs earlier in ``tags``, int64 [N]."""
    counts = Counter[bytes]()
    earlier = np.zeros(len(tags), np.int64)
    if len(tags) == 1:
        return earlier
    for index, tag in enumerate(tags.tolist()):
        earlier[index] = counts[tag]
        counts[tag] += 1
    return earlier


def _run_id(line: Disclosure | PrivateStep) -> str:
    return line.run if isinstance(line, PrivateStep) else line.way.run


def _format_number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


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
    if party.rows.awaits_sizes:
        # The number of rows at the other parties is only known after all have joined.
        return None
    if job != "train":
        sides = [
            (occurrence.exchange, occurrence.chains)
            for occurrence in party.exchanges.opened.values()
        ]
        return of_prediction(party, sides, rows)
    people = _AmountCounter(party, rows, plans)
    for number, occurrence in enumerate(occurrences(party, rows)):
        if number == MAX_STEPS:
            return None
        people.count(occurrence)
    people.finish()
    if party.recipe.rows.align in ("psi", "fuzzy") and party.recipe.rows.alignment is None:
        for peer in plans:
            plans[peer].amounts["alignments"] += 1
    _add_private_training(party, plans)
    return dict(plans)


def _add_private_training(party: Party, plans: dict[str, PlannedDisclosure]) -> None:
    """Adds the costs of this party's differentially private training for all other parties."""
    plan, name = find_privacy(party), party.name
    other_parties = [other.name for other in party.recipe.parties if other.name != name]
    if party.rows.data.label_noise is not None:
        for other in other_parties:
            plans[other].costs[party.rows.data.label_noise] += 1
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
                width = {"rows": 1, "width": party.exchanges.width}
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
        splits = {name: len(of) for name, of in party.rows.data.splits.items() if name in _APART}
        self._splits = {name: count for name, count in splits.items() if count} or {"": rows}
        # {(peer, phase, exchange, round): {cost of a row: number of rows}}.
        self._rounds: dict[tuple[str, str, str, int], Counter[_RowCost]] = defaultdict(Counter)
        self._chains = cache(self._party.exchanges.make_chains)
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
        for (peer, phase, *_), rows_by_cost in self._rounds.items():
            rows, aligns = sum(rows_by_cost.values()), phase == PHASE
            fitting = [count for count in self._splits.values() if count >= rows and not aligns]
            split_rows = min(fitting) if fitting else max(self._splits.values())
            # A linkage has each row of the table once, whatever its split will be.
            times = 1 if aligns else -(-rows // split_rows)
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
