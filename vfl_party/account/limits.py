"""The limits of an account: before a run starts, and before each bundle of it leaves."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.config.account import AccountLimits
from vfl_common.config.party import PartyFile
from vfl_common.config.policy import PolicySettings
from vfl_common.errors import Code, InputError
from vfl_common.text import count
from vfl_party.account.persons import Persons, tag_ids
from vfl_party.account.planned import PlannedDisclosure, of_prediction, plan_disclosures
from vfl_party.account.store import Standing, standing
from vfl_party.account.sums import OF_A_PERSON, OF_ALL, AccountSums, People, worst
from vfl_party.assembly.party import OpenedParty
from vfl_party.base.mechanism import Mechanism
from vfl_party.phases.context import Party
from vfl_party.policy.meeting import ProposedRun
from vfl_party.predict.prediction import exchanges_of
from vfl_party.record.book import LINES, RecordBook, folder_of, secret_of
from vfl_party.record.history import Disclosure, PrivateStep, RecordReader

_WHAT = {
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
    """Returns the limits of a party file; there are none without a table ``policy``."""
    return file.policy.account if isinstance(file.policy, PolicySettings) else AccountLimits()


def guard_of(
    book: RecordBook, limits: AccountLimits, *, resumes: bool = False
) -> AccountGuard | None:
    """Returns what holds a run of a party with this record to limits; None without any. Raises
    InputError if the account cannot be used.

    ``resumes``: the run may go on that an earlier process began, and was asked then.
    """
    if not limits.amounts:
        return None
    return AccountGuard(standing(book.folder), limits, book.secret, resumes=resumes)


def guards_without_run(file: PartyFile) -> list[AccountGuard]:
    """Returns what a check asks: the guard of a party that may have no record yet. It writes no
    record. Raises InputError if the account cannot be used.
    """
    limits, folder = limits_of(file), folder_of(Path(file.record.folder or file.out), file.name)
    if not limits.amounts:
        return []
    if not (folder / LINES).is_file():
        return [
            AccountGuard(
                Standing(folder, AccountSums(Persons(folder)), RecordReader()), limits, b""
            )
        ]
    return [AccountGuard(standing(folder), limits, secret_of(folder))]


@dataclass(frozen=True)
class Balance:
    """A limit at a peer: what is ``spent``, and what would be ``after`` more runs and
    predictions.
    """

    key: str
    peer: str
    limit: float
    spent: float
    after: float

    @property
    def passes(self) -> bool:
        """Whether these runs would pass the limit."""
        return self.after > self.limit and self.after > self.spent

    def words(self, runs: int, predictions: int) -> str:
        """Returns a sentence for the person who decides on so many runs and predicted rows."""
        of_all = self.key in OF_ALL
        predicted = [
            count(predictions, "predicted row") if of_all else "one prediction of each person"
        ]
        more = [*([count(runs, "run")] if runs else []), *(predicted if predictions else [])]
        over = ", which is more than is left" if self.passes else ""
        return (
            f"policy.account.{self.key} = {_number(self.limit)}: "
            f"{_WHAT[self.key].format(_number(self.spent))} at {self.peer}, and "
            f"{' and '.join(more)} would make it {_number(self.after)}{over}"
        )


class AccountGuard:
    """Holds a run to the limits: as a ``vfl_party.policy.meeting.RunGuard`` before it starts,
    and as what a ``Recorder`` asks of each bundle.

    It reads on in the record each time, so that what other programs of the party have sent
    meanwhile counts, too.
    """

    key = "account"

    def __init__(
        self, standing: Standing, limits: AccountLimits, secret: bytes, *, resumes: bool = False
    ) -> None:
        self._standing, self._limits, self._given = standing, limits, limits.amounts
        self._secret, self._resumes = secret, resumes
        # A party may serve several runs.
        self._asking = threading.Lock()

    def before(self, proposed: ProposedRun) -> None:
        """Raises InputError (REFUSED) if the run would pass a limit, by its plan."""
        if self._resumes:
            return
        opened = proposed.opened
        if opened.settings.spelt_by_recipe:
            rules = ", ".join(f'"{rule}"' for rule in opened.recipe.rows.id_rules)
            raise InputError(
                Code.REFUSED,
                "policy.account: counts people by their ids, and this recipe changes how ids are "
                f"spelt. Write data.id_rules = [{rules}] in the party file, so that no other "
                "recipe makes two people of one.",
            )
        plan = plan_disclosures(proposed.party, len(opened.table), opened.work.job)
        if plan is None:
            # Each bundle is held to the limits all the same.
            log.info(
                "what this run would spend is not known before it starts; each bundle is counted",
                extra={"event": "account"},
            )
            return
        self.check(tag_ids(self._secret, opened.table.ids), plan)

    def shows(self) -> None:
        """Shows nothing: what is spent is for this party's people alone."""

    def meet(self, run_id: str, facts: Mapping[str, object]) -> None:
        """Does nothing: the account does not depend on the other parties."""

    def __call__(self, line: Disclosure | PrivateStep) -> None:
        """Raises InputError (REFUSED) if what is about to leave would pass a limit at one of the
        receivers.
        """
        with self._asking:
            self._require_within(line)

    def wrote(self, line: Disclosure | PrivateStep, begin: int, end: int) -> None:
        """Counts what is written by now."""
        with self._asking:
            self._standing.take(line, begin, end)

    def may_predict(self, ids: Sequence[str], peer: str, run: str) -> npt.NDArray[np.bool_]:
        """Returns about which ids a peer may have an answer of a served run, [N], by the limits of
        predictions: so that somebody who is predicted too often is refused alone.
        """
        max_per_person = self._given.get("predictions_of_a_person")
        max_total = self._given.get("predictions")
        allowed = np.ones(len(ids), bool)
        if not len(ids) or (max_per_person is None and max_total is None):
            return allowed
        with self._asking:
            self._standing.catch_up()
            sums, tags = self._standing.sums, tag_ids(self._secret, ids)
            who = sums.persons.numbers(tags)
            peers = self._get_counted_peers(peer)
            if max_per_person is not None:
                spent = _vector(sums, peers, "predictions_of_a_person")
                # An id that occurs twice counts once more the second time.
                earlier = _times_before(tags)
                before = np.where(who >= 0, spent[np.maximum(who, 0)], 0) if len(spent) else 0
                allowed = before + earlier < max_per_person
            if max_total is not None:
                somebody = sums.runs[peer, run].person if (peer, run) in sums.runs else who.max()
                total = _total(sums, peers, sums.data_set(int(somebody)), "predictions")
                allowed &= np.cumsum(allowed) <= max_total - total
        return allowed

    def _require_within(self, line: Disclosure | PrivateStep) -> None:
        self._standing.catch_up()
        sums = self._standing.sums
        receivers = list(dict.fromkeys(line.to))
        # Together, each of several receivers has it.
        times = len(receivers) if self._limits.together else 1
        for peer in receivers:
            added, peers = sums.compute_added(line, peer), self._get_counted_peers(peer)
            for what in OF_A_PERSON:
                if what in self._given and what in added.people:
                    who, more = added.people[what]
                    before = _vector(sums, peers, what)[who]
                    after = before + times * more
                    if len(who) and after.max() > self._given[what]:
                        at = int(after.argmax())
                        self._refuse_bundle(
                            what, peer, int(before[at]), int(after[at] - before[at])
                        )
            for what in OF_ALL:
                more_of_all = times * added.run.get(what, 0)
                if what in self._given and more_of_all:
                    data_set = sums.data_set(sums.runs[peer, _run(line)].person)
                    total = _total(sums, peers, data_set, what)
                    if total + more_of_all > self._given[what]:
                        self._refuse_bundle(what, peer, total, more_of_all)
            self._check_epsilon(sums, peer, added.people, times)

    def _get_counted_peers(self, peer: str) -> list[str]:
        """Returns the peers whose sums a limit at ``peer`` counts."""
        if not self._limits.together:
            return [peer]
        return list(dict.fromkeys([*self._standing.sums.peers, peer]))

    def check(self, people: npt.NDArray[np.void], plan: Mapping[str, PlannedDisclosure]) -> None:
        """Raises InputError (REFUSED) if a run would pass a limit, by its plan.

        Args:
            people: the tags of the table's people.
            plan: {peer: what the run would send it}.
        """
        for balance in self._balances(people, plan):
            if balance.passes:
                raise InputError(
                    Code.REFUSED,
                    f"policy.account.{balance.key} = {balance.limit} in the party file: "
                    f"{_WHAT[balance.key].format(_number(balance.spent))} at {balance.peer}, and "
                    f"this run would add {_number(balance.after - balance.spent)}. Raise the "
                    "limit, or ask for less.",
                )

    def balances(
        self, opened: OpenedParty, party: Party, runs: int, predictions: int = 0
    ) -> list[Balance]:
        """Returns what so many runs and predicted rows would leave of each limit; empty if no plan
        is known. Of a person, one prediction counts: who is predicted more often is not known.
        """
        whole: dict[str, PlannedDisclosure] = defaultdict(PlannedDisclosure)
        plan = plan_disclosures(party, len(opened.table), "train") if runs else {}
        if plan is None:
            return []
        for peer, of_run in plan.items():
            whole[peer].add(of_run, runs)
        if predictions:
            for peer, of_rows in of_prediction(party, exchanges_of(party), predictions).items():
                whole[peer].add(of_rows, 1)
        return [*self._balances(tag_ids(self._secret, opened.table.ids), whole)]

    def _balances(
        self, people: npt.NDArray[np.void], plan: Mapping[str, PlannedDisclosure]
    ) -> Iterator[Balance]:
        self._standing.catch_up()
        sums, limits = self._standing.sums, self._limits
        who = sums.persons.find(people)
        sets = np.unique(sums.persons.sets[who])
        if limits.together and plan:
            whole = PlannedDisclosure()
            for of_peer in plan.values():
                whole.add(of_peer, 1)
            plan = {" and ".join(plan): whole}
        for peer, planned_ in plan.items():
            peers = self._get_counted_peers(peer)
            for what, limit in limits.amounts.items():
                if what == "epsilon":
                    spent, after = _epsilons(sums, peers, who, planned_, limits.delta)
                else:
                    spent = (
                        int(_vector(sums, peers, what)[who].max(initial=0))
                        if what in OF_A_PERSON
                        else sum(_total(sums, peers, int(data_set), what) for data_set in sets)
                    )
                    after = spent + planned_.amounts[what]
                yield Balance(what, peer, limit, spent, after)

    def _check_epsilon(self, sums: AccountSums, peer: str, added: People, receivers: int) -> None:
        if self._limits.epsilon is None:
            return
        for what, (who, more) in added.items():
            if not what.startswith("cost "):
                continue
            new = Mechanism.read(what.removeprefix("cost "))
            sums.vector(peer, what)
            before = [
                (mechanism, times[who])
                for mechanism, times in _costs(sums, self._get_counted_peers(peer))
            ]
            after = [
                (mechanism, times + receivers * more * (mechanism == new))
                for mechanism, times in before
            ]
            total = worst(after, self._limits.delta)
            if total > self._limits.epsilon:
                spent = worst(before, self._limits.delta)
                self._refuse_bundle("epsilon", peer, spent, total - spent)

    def _refuse_bundle(self, what: str, peer: str, spent: float, more: float) -> None:
        raise InputError(
            Code.REFUSED,
            f"policy.account.{what} = {self._given[what]} in the party file: "
            f"{_WHAT[what].format(_number(spent))} at {peer}, and what is about to leave adds "
            f"{_number(more)}; it did not leave. Raise the limit to send it.",
        )


def _vector(sums: AccountSums, peers: Sequence[str], what: str) -> npt.NDArray[np.int64]:
    """Returns the sums of all people, [P], over some peers."""
    sums_: npt.NDArray[np.int64] = np.sum([sums.vector(peer, what) for peer in peers], axis=0)
    return sums_


def _total(sums: AccountSums, peers: Sequence[str], data_set: int, what: str) -> int:
    return sum(sums.total(peer, data_set)[what] for peer in peers)


def _costs(
    sums: AccountSums, peers: Sequence[str]
) -> Iterator[tuple[Mechanism, npt.NDArray[np.int64]]]:
    """Yields each mechanism, and how often some peers have got it about each person, [P]."""
    totals: dict[Mechanism, npt.NDArray[np.int64]] = {}
    for peer in peers:
        for mechanism, times in sums.costs(peer):
            totals[mechanism] = totals[mechanism] + times if mechanism in totals else times
    yield from totals.items()


def _epsilons(
    sums: AccountSums,
    peers: Sequence[str],
    who: npt.NDArray[np.int64],
    plan: PlannedDisclosure,
    delta: float,
) -> tuple[float, float]:
    """Returns the greatest ε of these people, before and after what is planned."""
    before = {mechanism: times[who] for mechanism, times in _costs(sums, peers)}
    none = np.zeros(max(1, len(who)), np.int64)
    # Somebody new has spent nothing; the run costs all the same.
    known = {mechanism: times if len(times) else none for mechanism, times in before.items()}
    after = dict(known)
    for mechanism, times_ in plan.costs.items():
        after[mechanism] = after.get(mechanism, none) + times_
    return worst([*known.items()], delta), worst([*after.items()], delta)


def _times_before(tags: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Returns how often each has come before, [N]."""
    met = Counter[bytes]()
    earlier = np.zeros(len(tags), np.int64)
    if len(tags) == 1:
        return earlier
    for at, tag in enumerate(tags.tolist()):
        earlier[at] = met[tag]
        met[tag] += 1
    return earlier


def _run(line: Disclosure | PrivateStep) -> str:
    return line.run if isinstance(line, PrivateStep) else line.way.run


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
