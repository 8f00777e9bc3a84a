"""Enforces the limits of an account before a run starts and before each bundle is sent."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.config.party import PartyFile
from vfl_common.config.policy import AccountLimits, PolicySettings
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_common.text import count
from vfl_governance.account.persons import Persons, tag_ids
from vfl_governance.account.planned import PlannedDisclosure, of_prediction, plan_disclosures
from vfl_governance.account.store import Standing, standing
from vfl_governance.account.sums import OF_A_PERSON, OF_ALL, AccountSums, People, worst
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import OpenedParty
from vfl_party.base.mechanism import Mechanism
from vfl_party.phases.context import Party
from vfl_party.policy.guards import InstalledGuard, ServingGuard
from vfl_party.policy.meeting import ProposedRun
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
