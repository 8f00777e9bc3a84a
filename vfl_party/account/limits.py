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
from vfl_party.account.persons import Persons, tagged
from vfl_party.account.planned import Planned, of_prediction, planned
from vfl_party.account.store import Standing, standing
from vfl_party.account.sums import OF_A_PERSON, OF_ALL, People, Sums, worst
from vfl_party.assembly.party import Opened
from vfl_party.base.mechanism import Mechanism
from vfl_party.phases.context import Party
from vfl_party.policy.meeting import Proposed
from vfl_party.predict.prediction import exchanges_of
from vfl_party.record.book import LINES, Book, folder_of, secret_of
from vfl_party.record.history import Disclosure, Private, Reader

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


def guard_of(book: Book, limits: AccountLimits, *, resumes: bool = False) -> AccountGuard | None:
    """Returns what holds a run of a party with this record to limits; None without any. Raises
    InputError if the account cannot be used.

    ``resumes``: the run may go on that an earlier process began, and was asked then.
    """
    if not limits.given:
        return None
    return AccountGuard(standing(book.folder), limits, book.secret, resumes=resumes)


def guards_without_run(file: PartyFile) -> list[AccountGuard]:
    """Returns what a check asks: the guard of a party that may have no record yet. It writes no
    record. Raises InputError if the account cannot be used.
    """
    limits, folder = limits_of(file), folder_of(Path(file.record.folder or file.out), file.name)
    if not limits.given:
        return []
    if not (folder / LINES).is_file():
        return [AccountGuard(Standing(folder, Sums(Persons(folder)), Reader()), limits, b"")]
    return [AccountGuard(standing(folder), limits, secret_of(folder))]


@dataclass(frozen=True)
class Balance:
    """A limit at a peer: what is ``spent``, and what would be ``after`` more runs and
    predictions.
    """

    key: str
    peer: str
    most: float
    spent: float
    after: float

    @property
    def passes(self) -> bool:
        """Whether these runs would pass the limit."""
        return self.after > self.most and self.after > self.spent

    def words(self, runs: int, predictions: int) -> str:
        """Words it for who decides on so many runs and predicted rows."""
        of_all = self.key in OF_ALL
        predicted = [
            count(predictions, "predicted row") if of_all else "one prediction of each person"
        ]
        more = [*([count(runs, "run")] if runs else []), *(predicted if predictions else [])]
        spent = _WHAT[self.key].format(_number(self.spent))
        text = f"policy.account.{self.key} = {_number(self.most)}: {spent} at {self.peer}, and"
        over = ", which is more than is left" if self.passes else ""
        return f"{text} {' and '.join(more)} would make it {_number(self.after)}{over}"


class AccountGuard:
    """Holds a run to the limits: as a ``vfl_party.policy.meeting.Guard`` before it starts, and as
    what a ``Recorder`` asks of each bundle.

    It reads on in the record each time, so that what other programs of the party have sent
    meanwhile counts, too.
    """

    key = "account"

    def __init__(
        self, standing: Standing, limits: AccountLimits, secret: bytes, *, resumes: bool = False
    ) -> None:
        self._standing, self._limits, self._given = standing, limits, limits.given
        self._secret, self._resumes = secret, resumes
        # A party may serve several runs.
        self._asking = threading.Lock()

    def before(self, proposed: Proposed) -> None:
        """Raises InputError (REFUSED) if the run would pass a limit, by its plan."""
        if self._resumes:
            return
        opened = proposed.opened
        if opened.settings.spelt_by_recipe:
            rules = ", ".join(f'"{each}"' for each in opened.recipe.rows.id_rules)
            text = "policy.account counts people by their ids, and this recipe changes how ids are"
            text = f"{text} spelt; write data.id_rules = [{rules}] in the party file, so that no"
            raise InputError(Code.REFUSED, f"{text} other recipe makes two people of one")
        plan = planned(proposed.party, len(opened.table), opened.work.job)
        if plan is None:
            # Each bundle is held to the limits all the same.
            text = "what this run would spend is not known before it starts; each bundle is counted"
            log.info(text, extra={"event": "account"})
            return
        self.check(tagged(self._secret, opened.table.ids), plan)

    def shows(self) -> None:
        """What is spent is for this party's people alone."""

    def met(self, run_id: str, shown: Mapping[str, object]) -> None:
        """The others have no part in it."""

    def __call__(self, found: Disclosure | Private) -> None:
        """Raises InputError (REFUSED) if what is about to leave would pass a limit at one of the
        receivers.
        """
        with self._asking:
            self._require_within(found)

    def wrote(self, found: Disclosure | Private, begin: int, end: int) -> None:
        """Counts what is written by now."""
        with self._asking:
            self._standing.take(found, begin, end)

    def may_predict(self, ids: Sequence[str], peer: str, run: str) -> npt.NDArray[np.bool_]:
        """Returns about which ids a peer may have an answer of a served run, [N], by the limits of
        predictions: so that somebody who is predicted too often is refused alone.
        """
        most_each = self._given.get("predictions_of_a_person")
        most_all = self._given.get("predictions")
        allowed = np.ones(len(ids), bool)
        if not len(ids) or (most_each is None and most_all is None):
            return allowed
        with self._asking:
            self._standing.catch_up()
            sums, tags = self._standing.sums, tagged(self._secret, ids)
            who = sums.persons.numbers(tags)
            peers = self._counted(peer)
            if most_each is not None:
                spent = _vector(sums, peers, "predictions_of_a_person")
                # Of an id that comes twice, the second time.
                earlier = _times_before(tags)
                before = np.where(who >= 0, spent[np.maximum(who, 0)], 0) if len(spent) else 0
                allowed = before + earlier < most_each
            if most_all is not None:
                somebody = sums.runs[peer, run].person if (peer, run) in sums.runs else who.max()
                total = _total(sums, peers, sums.data_set(int(somebody)), "predictions")
                allowed &= np.cumsum(allowed) <= most_all - total
        return allowed

    def _require_within(self, found: Disclosure | Private) -> None:
        self._standing.catch_up()
        sums = self._standing.sums
        receivers = list(dict.fromkeys(found.to))
        # Together, each of several receivers has it.
        times = len(receivers) if self._limits.together else 1
        for peer in receivers:
            added, peers = sums.added(found, peer), self._counted(peer)
            for what in OF_A_PERSON:
                if what in self._given and what in added.people:
                    who, more = added.people[what]
                    before = _vector(sums, peers, what)[who]
                    after = before + times * more
                    if len(who) and after.max() > self._given[what]:
                        at = int(after.argmax())
                        self._refuse(what, peer, int(before[at]), int(after[at] - before[at]))
            for what in OF_ALL:
                more_ = times * added.run.get(what, 0)
                if what in self._given and more_:
                    data_set = sums.data_set(sums.runs[peer, _run(found)].person)
                    total = _total(sums, peers, data_set, what)
                    if total + more_ > self._given[what]:
                        self._refuse(what, peer, total, more_)
            self._check_epsilon(sums, peer, added.people, times)

    def _counted(self, peer: str) -> list[str]:
        """Returns the peers whose sums a limit at ``peer`` counts."""
        if not self._limits.together:
            return [peer]
        return list(dict.fromkeys([*self._standing.sums.peers, peer]))

    def check(self, people: npt.NDArray[np.void], plan: Mapping[str, Planned]) -> None:
        """Raises InputError (REFUSED) if a run would pass a limit, by its plan.

        Args:
            people: the tags of the table's people.
            plan: {peer: what the run would send it}.
        """
        for each in self._balances(people, plan):
            if each.passes:
                text = f"{_spent(self._limits, each.key, each.peer, each.spent)}, and this run"
                text = f"{text} would add {_number(each.after - each.spent)}; raise the limit, or"
                raise InputError(Code.REFUSED, f"{text} ask for less")

    def balances(
        self, opened: Opened, party: Party, runs: int, predictions: int = 0
    ) -> list[Balance]:
        """Returns what so many runs and predicted rows would leave of each limit; empty if no plan
        is known. Of a person, one prediction counts: who is predicted more often is not known.
        """
        whole: dict[str, Planned] = defaultdict(Planned)
        plan = planned(party, len(opened.table), "train") if runs else {}
        if plan is None:
            return []
        for peer, of_run in plan.items():
            whole[peer].add(of_run, runs)
        if predictions:
            for peer, of_rows in of_prediction(party, exchanges_of(party), predictions).items():
                whole[peer].add(of_rows, 1)
        return [*self._balances(tagged(self._secret, opened.table.ids), whole)]

    def _balances(
        self, people: npt.NDArray[np.void], plan: Mapping[str, Planned]
    ) -> Iterator[Balance]:
        self._standing.catch_up()
        sums, limits = self._standing.sums, self._limits
        who = sums.persons.find(people)
        sets = np.unique(sums.persons.sets[who])
        if limits.together and plan:
            whole = Planned()
            for of_peer in plan.values():
                whole.add(of_peer, 1)
            plan = {" and ".join(plan): whole}
        for peer, planned_ in plan.items():
            peers = self._counted(peer)
            for what, most in limits.given.items():
                if what == "epsilon":
                    spent, after = _epsilons(sums, peers, who, planned_, limits.delta)
                else:
                    spent = (
                        int(_vector(sums, peers, what)[who].max(initial=0))
                        if what in OF_A_PERSON
                        else sum(_total(sums, peers, int(each), what) for each in sets)
                    )
                    after = spent + planned_.amounts[what]
                yield Balance(what, peer, most, spent, after)

    def _check_epsilon(self, sums: Sums, peer: str, added: People, receivers: int) -> None:
        if self._limits.epsilon is None:
            return
        for what, (who, more) in added.items():
            if not what.startswith("cost "):
                continue
            new = Mechanism.read(what.removeprefix("cost "))
            sums.vector(peer, what)
            before = [(each, times[who]) for each, times in _costs(sums, self._counted(peer))]
            after = [(each, times + receivers * more * (each == new)) for each, times in before]
            would = worst(after, self._limits.delta)
            if would > self._limits.epsilon:
                spent = worst(before, self._limits.delta)
                self._refuse("epsilon", peer, spent, would - spent)

    def _refuse(self, what: str, peer: str, spent: float, more: float) -> None:
        text = f"{_spent(self._limits, what, peer, spent)}, and what is about to leave adds"
        raise InputError(Code.REFUSED, f"{text} {_number(more)}; it did not leave")


def _vector(sums: Sums, peers: Sequence[str], what: str) -> npt.NDArray[np.int64]:
    """Returns the sums of all people, [P], over some peers."""
    found: npt.NDArray[np.int64] = np.sum([sums.vector(peer, what) for peer in peers], axis=0)
    return found


def _total(sums: Sums, peers: Sequence[str], data_set: int, what: str) -> int:
    return sum(sums.total(peer, data_set)[what] for peer in peers)


def _costs(sums: Sums, peers: Sequence[str]) -> Iterator[tuple[Mechanism, npt.NDArray[np.int64]]]:
    """Yields each mechanism, and how often some peers have got it about each person, [P]."""
    found: dict[Mechanism, npt.NDArray[np.int64]] = {}
    for peer in peers:
        for each, times in sums.costs(peer):
            found[each] = found[each] + times if each in found else times
    yield from found.items()


def _epsilons(
    sums: Sums, peers: Sequence[str], who: npt.NDArray[np.int64], plan: Planned, delta: float
) -> tuple[float, float]:
    """Returns the greatest ε of these people, before and after what is planned."""
    before = {each: times[who] for each, times in _costs(sums, peers)}
    none = np.zeros(max(1, len(who)), np.int64)
    # Somebody new has spent nothing; the run costs all the same.
    known = {each: times if len(times) else none for each, times in before.items()}
    after = dict(known)
    for each, times_ in plan.costs.items():
        after[each] = after.get(each, none) + times_
    return worst([*known.items()], delta), worst([*after.items()], delta)


def _times_before(tags: npt.NDArray[np.void]) -> npt.NDArray[np.int64]:
    """Returns how often each has come before, [N]."""
    met = Counter[bytes]()
    found = np.zeros(len(tags), np.int64)
    if len(tags) == 1:
        return found
    for at, each in enumerate(tags.tolist()):
        found[at] = met[each]
        met[each] += 1
    return found


def _run(found: Disclosure | Private) -> str:
    return found.run if isinstance(found, Private) else found.way.run


def _spent(limits: AccountLimits, what: str, peer: str, spent: float) -> str:
    said = _WHAT[what].format(_number(spent))
    most = limits.given[what]
    return f"policy.account.{what} = {most} in the party file: {said} at {peer}"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
