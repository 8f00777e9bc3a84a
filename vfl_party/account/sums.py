"""What a record sums to: for each peer and person, and for each peer and run.

Everything follows from the lines of the record, one after the other. So the account of a killed run
is that of the lines that it has written, and an account that is lost is made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vfl_party.account.persons import Numbers, Persons
from vfl_party.align.exchanges import MASKED, TAGS
from vfl_party.base.mechanism import Mechanism
from vfl_party.privacy.accountant import compose
from vfl_party.record.history import Disclosure, PrivateStep

# Keys of the limits that hold for one person.
OF_A_PERSON = ("numbers_of_a_person", "bytes_of_a_person", "split_bits", "predictions_of_a_person")
# Numbers of a person that no mechanism makes private.
BARE = "numbers_without_privacy"
# Sums of a run; those of the first row have limits.
OF_ALL = ("bytes", "alignments", "predictions", "asked")
_COUNTS = ("bundles", "numbers", *OF_ALL)
_MAX_SUM = 2**62
# The number of the run in which a person was predicted last.
_LAST = "last"
_COST = "cost "
# Exchanges of psi that are sent only if rows are matched again.
_MATCHES = frozenset({MASKED.name, TAGS.name})
# Exchanges whose tensors are bits: each row of which they tell, as often as they have a bit of it.
_BITS = frozenset({("partition", "up"), ("walk", "up")})


@dataclass
class RunSum:
    """What one peer has got in one run. ``number``: of the run; ``person``: one of those whose data
    were used, -1 if nobody's were; ``aligned``: the generation whose alignment was counted last;
    ``asked``: the ids for which the peer has asked a served model, answered or not.
    """

    number: int
    job: str
    person: int = -1
    bundles: int = 0
    numbers: int = 0
    bytes: int = 0
    alignments: int = 0
    predictions: int = 0
    asked: int = 0
    aligned: int = -1
    first: float = 0.0
    last: float = 0.0


# {what: the people, and how much is added to each}.
People: TypeAlias = "dict[str, tuple[Numbers, Numbers | int]]"


class Added(NamedTuple):
    """What something adds for a peer: to sums of some people, and to the sums of the run."""

    people: People
    run: dict[str, int]


class _Mention(NamedTuple):
    """The rows and people that a bundle is about, and how often each person occurs.
    ``answered``: how often each is in an answer of a served model; None if it is not an answer.
    """

    rows: int
    who: Numbers
    times: Numbers
    answered: Numbers | None = None


@dataclass
class AccountSums:
    """The account. ``of``: {(peer, what): a number for each person}; ``runs``: {(peer, run): its
    sums}; ``taken``: {(run, phase, what tells keys apart): private steps}.
    """

    persons: Persons
    of: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    runs: dict[tuple[str, str], RunSum] = field(default_factory=dict)
    taken: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers: dict[str, int] = {run: sums.number for (_, run), sums in self.runs.items()}
        # Sums of data sets, as long as these stay apart.
        self._totals: dict[tuple[str, int], Counter[str]] = {}
        self._of_merge = -1
        none = np.empty(0, np.int64)
        self._last_mention: tuple[object, _Mention] = (None, _Mention(0, none, none))

    def check(self) -> None:
        """Raises ValueError or TypeError if sums that were read from a file do not fit together."""
        people = len(self.persons)
        fit = len(self.persons.sets) == people and all(
            len(numbers) <= people
            and (what == _LAST or numbers.min(initial=0) >= 0)
            # Larger sums could overflow.
            and numbers.max(initial=0) <= _MAX_SUM
            for (_, what), numbers in self.of.items()
        )
        counts = [getattr(run, name) for run in self.runs.values() for name in _COUNTS]
        fit = fit and all(isinstance(count, int) and count >= 0 for count in counts)
        fit = fit and all(-1 <= run.person < people for run in self.runs.values())
        if not fit or not all(isinstance(steps, int) for steps in self.taken.values()):
            raise ValueError
        for peer in self.peers:
            # Reads each mechanism.
            _ = [*self.costs(peer)]

    def add(self, line: Disclosure | PrivateStep) -> None:
        """Adds what a line tells of. Raises InputError if its people cannot be read."""
        for peer in dict.fromkeys(line.to):
            run = self._run(peer, line)
            added = self.compute_added(line, peer)
            for what, (who, amount) in added.people.items():
                vector = self.vector(peer, what)
                vector[who] = run.number if what == _LAST else vector[who] + amount
            for name, count in added.run.items():
                setattr(run, name, getattr(run, name) + count)
            self._count(peer, run.person, added.run)
            if isinstance(line, Disclosure):
                run.first, run.last = run.first or line.at, max(run.last, line.at)
                if added.run["alignments"]:
                    run.aligned = line.way.generation
        if isinstance(line, PrivateStep):
            key = line.run, line.phase, line.of
            self.taken[key] = max(self.taken.get(key, 0), line.steps)

    def compute_added(self, line: Disclosure | PrivateStep, peer: str) -> Added:
        """Returns what a line adds for a peer."""
        table = self.persons.of(line.people) if line.people else np.empty(0, np.int64)
        if isinstance(line, PrivateStep):
            before = self.taken.get((line.run, line.phase, line.of), 0)
            uses = max(0, line.steps - before)
            return Added({_COST + line.cost: (np.unique(table), uses)} if uses else {}, {})
        run = self._run(peer, line)
        rows, who, times, answered = self._get_mention(line, table, run.person)
        aligns = line.way.exchange in _MATCHES and run.aligned != line.way.generation
        counts = {
            "bundles": 1,
            "numbers": line.numbers,
            "bytes": line.payload_bytes,
            "alignments": int(aligns),
            "predictions": 0,
            "asked": line.asked,
        }
        people: People = {}
        if line.way.job != "train":
            predicted, often = self._find_predicted(line, peer, run, who, answered)
            counts["predictions"] = int(often.sum())
            people["predictions_of_a_person"] = predicted, often
            people[_LAST] = predicted, 0
        if not rows:
            return Added(people, counts)
        numbers = times * -(-line.numbers // rows)
        people |= {
            "numbers_of_a_person": (who, numbers),
            "bytes_of_a_person": (who, times * -(-line.payload_bytes // rows)),
            _COST + line.way.cost if line.way.cost else BARE: (
                who,
                times if line.way.cost else numbers,
            ),
        }
        if (line.way.exchange, line.way.direction) in _BITS:
            people["split_bits"] = who, times
        return Added(people, counts)

    def _find_predicted(
        self, line: Disclosure, peer: str, run: RunSum, who: Numbers, answered: Numbers | None
    ) -> tuple[Numbers, Numbers]:
        """Returns the people that a bundle about ``who`` predicts, and how often.
        ``answered``: see ``_Mention``.
        """
        if answered is None:
            # Once in a run.
            fresh = who[self.vector(peer, _LAST)[who] != run.number]
            return fresh, np.ones(len(fresh), np.int64)
        # Once in an answer; in a scoring of several questions, in the first one's.
        return (who, answered) if line.batch == 0 else (who[:0], answered[:0])

    def _get_mention(self, line: Disclosure, table: Numbers, neighbor: int) -> _Mention:
        """Returns the rows and people of a bundle. ``neighbor``: a person of the run, -1 if none
        is known yet.
        """
        key = line.people, line.about, neighbor
        # Each receiver asks, once before the bundle leaves and once when its line is read.
        if key == self._last_mention[0]:
            return self._last_mention[1]
        if (tagged := line.tags) is not None:
            mention = self._get_mention_by_tags(*tagged, neighbor)
        else:
            rows = line.rows if line.people else np.empty(0, np.int64)
            if (rows[1:] > rows[:-1]).all() and line.people in self.persons.apart:
                who, times = table[rows], np.ones(len(rows), np.int64)
            else:
                who, times = np.unique(table[rows], return_counts=True)
            mention = _Mention(len(rows), who, times)
        self._last_mention = key, mention
        return mention

    def _get_mention_by_tags(
        self, tags: npt.NDArray[np.void], often: Numbers, neighbor: int
    ) -> _Mention:
        who = self.persons.enroll(tags, neighbor)
        rows = int(often.sum())
        if len(who) == 1:
            return _Mention(rows, who, often, np.ones(1, np.int64))
        who, at, answered = np.unique(who, return_inverse=True, return_counts=True)
        times = np.bincount(at.reshape(-1), often, len(who)).astype(np.int64)
        return _Mention(rows, who, times, answered)

    def vector(self, peer: str, what: str) -> Numbers:
        """Returns the sums of all people, [P]."""
        sums, count = self.of.get((peer, what)), len(self.persons)
        if sums is None or len(sums) < count:
            # People come one by one while a model serves.
            room = count if sums is None else count + count // 8
            resized = np.full(room, -1 if what == _LAST else 0, np.int64)
            if sums is not None:
                resized[: len(sums)] = sums
            sums = self.of[peer, what] = resized
        return sums[:count]

    def total(self, peer: str, data_set: int) -> Counter[str]:
        """Returns the sums of a data set's runs."""
        if self._of_merge != self.persons.merged:
            self._totals, self._of_merge = {}, self.persons.merged
            for (to, _), run in self.runs.items():
                self._count(to, run.person, {name: getattr(run, name) for name in _COUNTS})
        return self._totals.setdefault((peer, data_set), Counter())

    def costs(self, peer: str) -> Iterator[tuple[Mechanism, Numbers]]:
        """Yields each mechanism, and how often it was used about each person."""
        for (to, what), _ in [*self.of.items()]:
            if to == peer and what.startswith(_COST):
                yield Mechanism.read(what.removeprefix(_COST)), self.vector(peer, what)

    @property
    def peers(self) -> list[str]:
        """The peers that have received anything."""
        return list(dict.fromkeys(peer for peer, _ in self.runs))

    def data_set(self, person: int) -> int:
        """Returns the data set of a person; -1 for nobody."""
        return int(self.persons.sets[person]) if person >= 0 else -1

    def _run(self, peer: str, line: Disclosure | PrivateStep) -> RunSum:
        name = line.run if isinstance(line, PrivateStep) else line.way.run
        run = self.runs.get((peer, name))
        if run is None:
            number = self._numbers.setdefault(name, len(self._numbers))
            job = "train" if isinstance(line, PrivateStep) else line.way.job
            run = self.runs[peer, name] = RunSum(number, job)
        if run.person < 0:
            run.person = self._find_person(line)
            if run.person >= 0:
                # What it had before was nobody's.
                self._of_merge = -1
        return run

    def _find_person(self, line: Disclosure | PrivateStep) -> int:
        """Returns one of the people whose data a line is about, -1 if there is none."""
        tagged = line.tags if isinstance(line, Disclosure) else None
        if tagged is not None:
            table = self.persons.enroll(tagged[0], -1)
        else:
            table = self.persons.of(line.people) if line.people else np.empty(0, np.int64)
        return int(table[0]) if len(table) else -1

    def _count(self, peer: str, person: int, counts: dict[str, int]) -> None:
        if self._of_merge == self.persons.merged:
            key = peer, self.data_set(person)
            self._totals.setdefault(key, Counter()).update(counts)


def worst(costs: list[tuple[Mechanism, Numbers]], delta: float) -> float:
    """Returns the greatest ε of any person. ``costs``: each mechanism, and how often it was used
    about each of the same people.
    """
    if not costs or not len(costs[0][1]):
        return 0.0
    mechanisms = tuple(mechanism for mechanism, _ in costs)
    uses = np.stack([times for _, times in costs], axis=1)
    maximum = uses.max(axis=0)
    # Mostly somebody has the most of each, and is the worst.
    uses = maximum[None] if (uses == maximum).all(axis=1).any() else np.unique(uses, axis=0)
    return max(_epsilon(mechanisms, tuple(row), delta) for row in uses.tolist())


@lru_cache(maxsize=4096)
def _epsilon(mechanisms: tuple[Mechanism, ...], times: tuple[int, ...], delta: float) -> float:
    return compose(zip(mechanisms, times, strict=True), delta)
