"""Numbers the people of a record, so that each person is counted once over all tables.

People are identified by the keyed digests (tags) of their ids. Tables that have people in common
are one data set. So a file that is renamed or gets new customers stays in the same account. If two
unrelated tables have the same id, they also become one data set, and the account may count more
than was spent, but never less.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.record.lines import PEOPLE_FOLDER, TAG_BYTES, read_tags, tag_person

Numbers = npt.NDArray[np.int64]
_TAG = np.dtype(f"V{TAG_BYTES}")
# The maximum number of cached tables. A run has two tables.
_MAX_TABLES = 8
# The maximum number of people that are looked up in a dict instead of a sorted array.
_FEW = 1024


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
    path = folder / PEOPLE_FOLDER / digest
    try:
        return np.frombuffer(read_tags(path, digest), _TAG)
    except ValueError:
        raise InputError(
            Code.FILE_INVALID, f"{path}: not a valid table of people. Restore it from a backup."
        ) from None


def tag_ids(secret: bytes, ids: Iterable[str]) -> npt.NDArray[np.void]:
    """Returns the tags of ids, [N]."""
    return np.frombuffer(b"".join([tag_person(secret, cell) for cell in ids]), _TAG)
