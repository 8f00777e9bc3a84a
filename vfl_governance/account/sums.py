"""Computes the totals of a record for each peer and person, and for each peer and run.

The totals depend only on the lines of the record. So the account includes all lines that a killed
run has written, and a lost account can be computed again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.align import MATCHING
from vfl_party.base.mechanism import Mechanism
from vfl_party.privacy.accountant import compose
from vfl_party.record import lines
from vfl_party.record.history import Disclosure, PrivateStep

Numbers = npt.NDArray[np.int64]


_TAG = np.dtype(f"V{lines.TAG_BYTES}")


# The maximum number of cached tables. A run has two tables.
_MAX_TABLES = 8


# The maximum number of people that are looked up in a dict instead of a sorted array.
_FEW = 1024


# People are identified by the keyed digests (tags) of their ids. Tables that have people in common
# are one data set. So a file that is renamed or gets new customers stays in the same account. If
# two unrelated tables have the same id, they also become one data set, and the account may count
# more than was spent, but never less.
class Persons:
    """Assigns numbers to people, in the order of their first occurrence, and to data sets."""

    def __init__(self, folder: Path, tags: bytes = b"", sets: bytes = b"") -> None:
        self._folder = folder
        self._tags = np.frombuffer(tags, _TAG)
        self._sets: Numbers = np.frombuffer(sets, np.int64).copy()
        self._count = len(self._tags)
        # {tag: number} for the people who were added since the last sort.
        self._unsorted: dict[bytes, int] = {}
        # The last tags that were looked up, if all were known, and their numbers.
        self._last_lookup: tuple[bytes, Numbers] = (b"", np.empty(0, np.int64))
        self._sort()
        self._numbers_by_table: dict[str, Numbers] = {}
        # The tables in which no person occurs twice.
        self.apart: set[str] = set()
        # How often data sets were merged.
        self.merged = 0

    def __len__(self) -> int:
        return self._count

    @property
    def tags(self) -> npt.NDArray[np.void]:
        """The tag of each person, [P]."""
        return self._tags[: self._count]

    @property
    def sets(self) -> Numbers:
        """The data set of each person, [P]."""
        return self._sets[: self._count]

    def of(self, digest: str) -> Numbers:
        """Returns the number of the person in each row of a table, int64 [N].

        ``digest``: The name of a table of people in the record. Raises InputError if the table
        cannot be read.
        """
        numbers = self._numbers_by_table.get(digest)
        if numbers is None:
            numbers = self._assign_numbers(_read_tags(self._folder, digest))
            self._numbers_by_table[digest] = numbers
            if len(np.unique(numbers)) == len(numbers):
                self.apart.add(digest)
            while len(self._numbers_by_table) > _MAX_TABLES:
                del self._numbers_by_table[next(iter(self._numbers_by_table))]
        return numbers

    def enroll(self, tags: npt.NDArray[np.void], neighbor: int) -> Numbers:
        """Returns the numbers of people who are not in a table, and adds new people.

        ``neighbor``: The number of another person in their data set, or -1.
        """
        return self._assign_numbers(tags, neighbor)

    def find(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns the numbers of the people who are already known."""
        places = self.numbers(tags)
        return places[places >= 0]

    def numbers(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns the number of each person, int64 [N]. People who are not known have -1."""
        key = tags.tobytes() if len(tags) <= _FEW else b""
        # A request to a served model looks up the same people several times.
        if key and key == self._last_lookup[0]:
            return self._last_lookup[1]
        places = np.full(len(tags), -1, np.int64)
        if len(self._sorted):
            positions = self._sorted.searchsorted(tags)
            np.minimum(positions, len(self._sorted) - 1, out=positions)
            places = self._order[positions]
            places[self._sorted[positions] != tags] = -1
        if self._unsorted:
            for place in np.flatnonzero(places < 0).tolist():
                places[place] = self._unsorted.get(tags[place].tobytes(), -1)
        if key and places.min() >= 0:
            self._last_lookup = key, places
        return places

    def _sort(self) -> None:
        self._order = np.argsort(self.tags, kind="stable")
        self._sorted = self.tags[self._order]
        self._unsorted = {}

    def _assign_numbers(self, tags: npt.NDArray[np.void], neighbor: int = -1) -> Numbers:
        """Returns the number of each person, int64 [N], and adds new people to one data set."""
        places = self.numbers(tags)
        if self._are_together(places, neighbor):
            return places
        # Several rows of a table may be about the same person.
        new_tags, first_rows, inverse = np.unique(
            tags[places < 0], return_index=True, return_inverse=True
        )
        rank = np.empty(len(new_tags), np.int64)
        rank[np.argsort(first_rows)] = np.arange(len(new_tags))
        places[places < 0] = self._count + rank[inverse.reshape(-1)]
        known_numbers = places[places < self._count]
        data_sets = np.unique(
            self.sets[np.append(known_numbers, neighbor) if neighbor >= 0 else known_numbers]
        )
        label = int(data_sets[0]) if len(data_sets) else int(self.sets.max(initial=-1)) + 1
        if len(data_sets) > 1:
            self.sets[np.isin(self.sets, data_sets)] = label
            self.merged += 1
        if len(new_tags):
            self._add(new_tags[np.argsort(rank)], label)
        return places

    def _are_together(self, places: Numbers, neighbor: int) -> bool:
        """Returns whether all people are known and in the same data set."""
        if not len(places) or places.min() < 0:
            return False
        sets = self._sets[places]
        return bool((sets == (self._sets[neighbor] if neighbor >= 0 else sets[0])).all())

    def _add(self, new_tags: npt.NDArray[np.void], label: int) -> None:
        """Adds people to a data set.

        A few new people are kept in a dict, because sorting millions for each person is too slow.
        """
        first_number, self._count = self._count, self._count + len(new_tags)
        if self._count > len(self._tags):
            room = self._count + first_number // 8
            self._tags, self._sets = _resize(self._tags, room), _resize(self._sets, room)
        self._tags[first_number : self._count], self._sets[first_number : self._count] = (
            new_tags,
            label,
        )
        if len(self._unsorted) + len(new_tags) > max(_FEW, first_number // 8):
            self._sort()
            return
        self._unsorted.update((tag.tobytes(), first_number + at) for at, tag in enumerate(new_tags))


def _resize(old: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    resized = np.zeros(room, old.dtype)
    resized[: len(old)] = old
    return resized


def _read_tags(folder: Path, digest: str) -> npt.NDArray[np.void]:
    """Returns the tags of a table's rows. Raises InputError if the table cannot be read."""
    path = folder / lines.PEOPLE_FOLDER / digest
    try:
        return np.frombuffer(lines.read_tags(path, digest), _TAG)
    except ValueError:
        raise InputError(
            Code.FILE_INVALID, f"{path}: not a valid table of people. Restore it from a backup."
        ) from None


def tag_ids(secret: bytes, ids: Iterable[str]) -> npt.NDArray[np.void]:
    """Returns the tags of ids, [N]."""
    return np.frombuffer(b"".join([lines.tag_person(secret, cell) for cell in ids]), _TAG)


# The keys of the limits that apply to one person.
OF_A_PERSON = ("numbers_of_a_person", "bytes_of_a_person", "split_bits", "predictions_of_a_person")
# The key of the count of numbers about a person without differential privacy.
BARE = "numbers_without_privacy"
# The totals of a run. Only the first line has the keys of limits.
OF_ALL = ("bytes", "alignments", "predictions", "asked")
_COUNTS = ("bundles", "numbers", *OF_ALL)
_MAX_SUM = 2**62
# The key of the number of the run in which a person was last predicted.
_LAST = "last"
_COST = "cost "
# The exchanges that send bits. Their lines name a row once for each bit about the row.
_BITS = frozenset({("partition", "up"), ("walk", "up")})


@dataclass
class RunSum:
    """The totals of what one peer has received in one run.

    ``number`` is the number of the run. ``person`` is one of the people in the run's data, or -1 if
    there are none. ``asked`` counts the ids in requests to a served model, whether answered or not.
    ``aligned`` is the last generation whose entity alignment was counted.
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


# {key: (people, amount to add for each)}.
People: TypeAlias = "dict[str, tuple[Numbers, Numbers | int]]"


class Added(NamedTuple):
    """The amounts that a line adds for a peer: for people, and for the run."""

    people: People
    run: dict[str, int]


class _Mention(NamedTuple):
    """The rows and people in a bundle.

    ``times`` says how often each person in ``who`` occurs. ``answered`` says how often each person
    is in an answer of a served model, or is None if the bundle is not such an answer.
    """

    rows: int
    who: Numbers
    times: Numbers
    answered: Numbers | None = None


@dataclass
class AccountSums:
    """The totals of an account.

    Args:
        persons: The people and their data sets.
        of: {(peer, key): amount for each person, int64 [P]}.
        runs: {(peer, run): totals}.
        taken: {(run, phase, id of the sampling and noise keys): number of private steps}.
    """

    persons: Persons
    of: dict[tuple[str, str], Numbers] = field(default_factory=dict)
    runs: dict[tuple[str, str], RunSum] = field(default_factory=dict)
    taken: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers: dict[str, int] = {run: sums.number for (_, run), sums in self.runs.items()}
        # The totals of data sets. They are computed again after data sets were merged.
        self._totals: dict[tuple[str, int], Counter[str]] = {}
        self._of_merge = -1
        no_people = np.empty(0, np.int64)
        self._last_mention: tuple[object, _Mention] = (None, _Mention(0, no_people, no_people))

    def check(self) -> None:
        """Raises ValueError or TypeError if totals that were read from a file are inconsistent."""
        people = len(self.persons)
        is_valid = len(self.persons.sets) == people and all(
            len(numbers) <= people
            and (what == _LAST or numbers.min(initial=0) >= 0)
            # Larger sums could overflow.
            and numbers.max(initial=0) <= _MAX_SUM
            for (_, what), numbers in self.of.items()
        )
        counts = [getattr(run, name) for run in self.runs.values() for name in _COUNTS]
        is_valid = is_valid and all(isinstance(count, int) and count >= 0 for count in counts)
        is_valid = is_valid and all(-1 <= run.person < people for run in self.runs.values())
        if not is_valid or not all(isinstance(steps, int) for steps in self.taken.values()):
            raise ValueError("the totals of the account are inconsistent")
        for peer in self.peers:
            # This parses each mechanism, which raises ValueError if a mechanism is invalid.
            _ = [*self.costs(peer)]

    def add(self, line: Disclosure | PrivateStep) -> None:
        """Adds the amounts of a line. Raises InputError if its people cannot be read."""
        for peer in dict.fromkeys(line.to):
            run = self._get_run(peer, line)
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
        """Returns the amounts that a line adds for a peer."""
        table = self.persons.of(line.people) if line.people else np.empty(0, np.int64)
        if isinstance(line, PrivateStep):
            before = self.taken.get((line.run, line.phase, line.of), 0)
            uses = max(0, line.steps - before)
            return Added({_COST + line.cost: (np.unique(table), uses)} if uses else {}, {})
        run = self._get_run(peer, line)
        rows, who, times, answered = self._get_mention(line, table, run.person)
        matches = line.way.exchange in MATCHING
        aligns = matches and run.aligned != line.way.generation
        counts = {
            "bundles": 1,
            "numbers": line.numbers,
            "bytes": line.payload_bytes,
            "alignments": int(aligns),
            "predictions": 0,
            "asked": line.asked,
        }
        people: People = {}
        # Encodings are of all rows of the table, and not only of those to predict.
        if line.way.job != "train" and not matches:
            predicted, prediction_counts = self._find_predicted(line, peer, run, who, answered)
            counts["predictions"] = int(prediction_counts.sum())
            people["predictions_of_a_person"] = predicted, prediction_counts
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
        """Returns the people whose predictions a bundle counts, and how often.

        ``who``: The people in the bundle. ``answered``: See ``_Mention``.
        """
        if answered is None:
            # A person counts once in a run.
            new_people = who[self.vector(peer, _LAST)[who] != run.number]
            return new_people, np.ones(len(new_people), np.int64)
        # A person counts once in an answer. If a scoring has several requests, only the first
        # counts.
        return (who, answered) if line.batch == 0 else (who[:0], answered[:0])

    def _get_mention(self, line: Disclosure, table: Numbers, neighbor: int) -> _Mention:
        """Returns the rows and people in a bundle.

        ``neighbor``: The number of a person in the run, or -1 if none is known yet.
        """
        key = line.people, line.about, neighbor
        # The same bundle is looked up for each receiver, before it is sent and after its line is
        # written.
        if key == self._last_mention[0]:
            return self._last_mention[1]
        if (packed_tags := line.tags) is not None:
            mention = self._get_mention_by_tags(*packed_tags, neighbor)
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
        self, tags: npt.NDArray[np.void], counts: Numbers, neighbor: int
    ) -> _Mention:
        who = self.persons.enroll(tags, neighbor)
        rows = int(counts.sum())
        if len(who) == 1:
            return _Mention(rows, who, counts, np.ones(1, np.int64))
        who, indices, answered = np.unique(who, return_inverse=True, return_counts=True)
        times = np.bincount(indices.reshape(-1), counts, len(who)).astype(np.int64)
        return _Mention(rows, who, times, answered)

    def vector(self, peer: str, what: str) -> Numbers:
        """Returns the amounts of all people for a peer and a key, int64 [P]."""
        sums, count = self.of.get((peer, what)), len(self.persons)
        if sums is None or len(sums) < count:
            # While a model is served, people are added one by one, so this reserves space.
            room = count if sums is None else count + count // 8
            resized = np.full(room, -1 if what == _LAST else 0, np.int64)
            if sums is not None:
                resized[: len(sums)] = sums
            sums = self.of[peer, what] = resized
        return sums[:count]

    def total(self, peer: str, data_set: int) -> Counter[str]:
        """Returns the totals over all runs of a data set."""
        if self._of_merge != self.persons.merged:
            self._totals, self._of_merge = {}, self.persons.merged
            for (to, _), run in self.runs.items():
                self._count(to, run.person, {name: getattr(run, name) for name in _COUNTS})
        return self._totals.setdefault((peer, data_set), Counter())

    def costs(self, peer: str) -> Iterator[tuple[Mechanism, Numbers]]:
        """Yields each mechanism with the number of its uses about each person, int64 [P]."""
        for (to, what), _ in [*self.of.items()]:
            if to == peer and what.startswith(_COST):
                yield Mechanism.read(what.removeprefix(_COST)), self.vector(peer, what)

    @property
    def peers(self) -> list[str]:
        """The peers that have received anything."""
        return list(dict.fromkeys(peer for peer, _ in self.runs))

    def data_set(self, person: int) -> int:
        """Returns the number of a person's data set, or -1 if ``person`` is -1."""
        return int(self.persons.sets[person]) if person >= 0 else -1

    def _get_run(self, peer: str, line: Disclosure | PrivateStep) -> RunSum:
        name = line.run if isinstance(line, PrivateStep) else line.way.run
        run = self.runs.get((peer, name))
        if run is None:
            number = self._numbers.setdefault(name, len(self._numbers))
            job = "train" if isinstance(line, PrivateStep) else line.way.job
            run = self.runs[peer, name] = RunSum(number, job)
        if run.person < 0:
            run.person = self._find_person(line)
            if run.person >= 0:
                # The run now has a data set, so the totals of data sets must be computed again.
                self._of_merge = -1
        return run

    def _find_person(self, line: Disclosure | PrivateStep) -> int:
        """Returns the number of one of the people in a line, or -1 if there are none."""
        packed_tags = line.tags if isinstance(line, Disclosure) else None
        if packed_tags is not None:
            table = self.persons.enroll(packed_tags[0], -1)
        else:
            table = self.persons.of(line.people) if line.people else np.empty(0, np.int64)
        return int(table[0]) if len(table) else -1

    def _count(self, peer: str, person: int, counts: dict[str, int]) -> None:
        if self._of_merge == self.persons.merged:
            key = peer, self.data_set(person)
            self._totals.setdefault(key, Counter()).update(counts)


def worst(costs: list[tuple[Mechanism, Numbers]], delta: float) -> float:
    """Returns the greatest ε of any person.

    ``costs``: Each mechanism with the number of its uses about each person, int64 [P].
    """
    if not costs or not len(costs[0][1]):
        return 0.0
    mechanisms = tuple(mechanism for mechanism, _ in costs)
    uses = np.stack([times for _, times in costs], axis=1)
    maximum = uses.max(axis=0)
    # Usually one person has the maximum of every mechanism, and thus the greatest ε.
    uses = maximum[None] if (uses == maximum).all(axis=1).any() else np.unique(uses, axis=0)
    return max(_epsilon(mechanisms, tuple(row), delta) for row in uses.tolist())


@lru_cache(maxsize=4096)
def _epsilon(mechanisms: tuple[Mechanism, ...], times: tuple[int, ...], delta: float) -> float:
    return compose(zip(mechanisms, times, strict=True), delta)
