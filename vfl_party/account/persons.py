"""The people of a record, each once: by the keyed digest of the id, over all tables.

Tables that have people in common are one data set: a file that is renamed, or that has new
customers, is the same account. An id that two unrelated tables share makes them one, too: more is
counted then than was spent, and never less.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.record import people

Numbers = npt.NDArray[np.int64]
_TAG = np.dtype(f"V{people.TAG_BYTES}")
# Tables whose numbers are remembered; a run has two.
_MAX_TABLES = 8
# Number of new people up to which they are not sorted.
_FEW = 1024


class Persons:
    """Numbers the people, in the order in which they are met; and the data sets."""

    def __init__(self, folder: Path, tags: bytes = b"", sets: bytes = b"") -> None:
        self._folder = folder
        self._tags = np.frombuffer(tags, _TAG)
        self._sets: Numbers = np.frombuffer(sets, np.int64).copy()
        self._count = len(self._tags)
        # Those who have come since the others were sorted: {tag: number}.
        self._late: dict[bytes, int] = {}
        # The people that were asked for last, if all are known; and their numbers, which stay.
        self._last: tuple[bytes, Numbers] = (b"", np.empty(0, np.int64))
        self._sort()
        self._known: dict[str, Numbers] = {}
        # Tables whose rows are of different people.
        self.apart: set[str] = set()
        # How often data sets have become one.
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
        """Returns the person of each row of a table that the record has noted. Raises
        InputError.
        """
        numbers = self._known.get(digest)
        if numbers is None:
            numbers = self._assign_numbers(_read(self._folder, digest))
            self._known[digest] = numbers
            if len(np.unique(numbers)) == len(numbers):
                self.apart.add(digest)
            while len(self._known) > _MAX_TABLES:
                del self._known[next(iter(self._known))]
        return numbers

    def enroll(self, tags: npt.NDArray[np.void], neighbor: int) -> Numbers:
        """Returns the numbers of people who occur without a table. ``neighbor``: a person of
        their data set, -1 if there is none.
        """
        return self._assign_numbers(tags, neighbor)

    def find(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns the numbers of those of these people that are known."""
        places = self.numbers(tags)
        return places[places >= 0]

    def numbers(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns the number of each person, -1 for those who are not known."""
        key = tags.tobytes() if len(tags) <= _FEW else b""
        # A served question asks before it is answered, and when its line is written and read.
        if key and key == self._last[0]:
            return self._last[1]
        places = np.full(len(tags), -1, np.int64)
        if len(self._sorted):
            at = self._sorted.searchsorted(tags)
            np.minimum(at, len(self._sorted) - 1, out=at)
            places = self._order[at]
            places[self._sorted[at] != tags] = -1
        if self._late:
            for place in np.flatnonzero(places < 0).tolist():
                places[place] = self._late.get(tags[place].tobytes(), -1)
        if key and places.min() >= 0:
            self._last = key, places
        return places

    def _sort(self) -> None:
        self._order = np.argsort(self.tags, kind="stable")
        self._sorted = self.tags[self._order]
        self._late = {}

    def _assign_numbers(self, tags: npt.NDArray[np.void], neighbor: int = -1) -> Numbers:
        """Returns the number of each person; new people get one, and the data set of the others."""
        places = self.numbers(tags)
        if self._are_together(places, neighbor):
            return places
        # Rows of one table may be of one person.
        new, first, back = np.unique(tags[places < 0], return_index=True, return_inverse=True)
        rank = np.empty(len(new), np.int64)
        rank[np.argsort(first)] = np.arange(len(new))
        places[places < 0] = self._count + rank[back.reshape(-1)]
        known = places[places < self._count]
        met = np.unique(self.sets[np.append(known, neighbor) if neighbor >= 0 else known])
        label = int(met[0]) if len(met) else int(self.sets.max(initial=-1)) + 1
        if len(met) > 1:
            self.sets[np.isin(self.sets, met)] = label
            self.merged += 1
        if len(new):
            self._add(new[np.argsort(rank)], label)
        return places

    def _are_together(self, places: Numbers, neighbor: int) -> bool:
        """Whether all are known, and in one data set."""
        if not len(places) or places.min() < 0:
            return False
        sets = self._sets[places]
        return bool((sets == (self._sets[neighbor] if neighbor >= 0 else sets[0])).all())

    def _add(self, new: npt.NDArray[np.void], label: int) -> None:
        """Adds people. A few are found by a dict for a while: sorting millions for each new person
        takes too long.
        """
        first, self._count = self._count, self._count + len(new)
        if self._count > len(self._tags):
            room = self._count + first // 8
            self._tags, self._sets = _resize(self._tags, room), _resize(self._sets, room)
        self._tags[first : self._count], self._sets[first : self._count] = new, label
        if len(self._late) + len(new) > max(_FEW, first // 8):
            self._sort()
            return
        self._late.update((tag.tobytes(), first + at) for at, tag in enumerate(new))


def _resize(old: npt.NDArray[Any], room: int) -> npt.NDArray[Any]:
    resized = np.zeros(room, old.dtype)
    resized[: len(old)] = old
    return resized


def _read(folder: Path, digest: str) -> npt.NDArray[np.void]:
    """Returns the tags of a table's rows. Raises InputError."""
    path = folder / people.FOLDER / digest
    try:
        return np.frombuffer(people.read(path, digest), _TAG)
    except ValueError:
        raise InputError(
            Code.FILE_INVALID, f"{path}: is not a list of people. Restore it from a backup."
        ) from None


def tag_ids(secret: bytes, ids: Iterable[str]) -> npt.NDArray[np.void]:
    """Returns the tags of ids, [N]."""
    return np.frombuffer(b"".join([people.tag(secret, cell) for cell in ids]), _TAG)
