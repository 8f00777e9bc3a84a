"""The people of a record, each once: by the keyed digest of the id, over all tables.

Tables that have people in common are one data set: a file that is renamed, or that has new
customers, is the same account. An id that two unrelated tables share makes them one, too: more is
counted then than was spent, and never less.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.record import people

Numbers = npt.NDArray[np.int64]
_TAG = np.dtype(f"V{people.TAG_BYTES}")
# Of tables whose places are remembered: a run has two.
_MOST = 8


class Persons:
    """Numbers the people, in the order in which they are met; and the data sets.

    ``tags``: of each person, [P]. ``sets``: the data set of each, [P].
    """

    def __init__(self, folder: Path, tags: bytes = b"", sets: bytes = b"") -> None:
        self._folder = folder
        self.tags = np.frombuffer(tags, _TAG)
        self.sets: Numbers = np.frombuffer(sets, np.int64).copy()
        self._order = np.argsort(self.tags, kind="stable")
        self._known: dict[str, Numbers] = {}
        # Tables whose rows are of different people.
        self.apart: set[str] = set()
        # How often data sets have become one.
        self.merged = 0

    def __len__(self) -> int:
        return len(self.tags)

    def of(self, digest: str) -> Numbers:
        """Returns the person of each row of a table that the record has noted. Raises
        InputError.
        """
        found = self._known.get(digest)
        if found is None:
            found = self._numbered(_read(self._folder, digest))
            self._known[digest] = found
            if len(np.unique(found)) == len(found):
                self.apart.add(digest)
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
        return found

    def find(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns the numbers of those of these people that are known."""
        places = self._places(tags)
        return places[places >= 0]

    def _places(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns each one's number, -1 of those who are not known."""
        if not len(self.tags):
            return np.full(len(tags), -1, np.int64)
        sorted_ = self.tags[self._order]
        at = np.minimum(np.searchsorted(sorted_, tags), len(sorted_) - 1)
        return np.where(sorted_[at] == tags, self._order[at], -1)

    def _numbered(self, tags: npt.NDArray[np.void]) -> Numbers:
        """Returns each one's number; those who are new get one, and the data set of the others."""
        places = self._places(tags)
        # Rows of one table may be of one person.
        new, first, back = np.unique(tags[places < 0], return_index=True, return_inverse=True)
        rank = np.empty(len(new), np.int64)
        rank[np.argsort(first)] = np.arange(len(new))
        places[places < 0] = len(self.tags) + rank[back]
        met = np.unique(self.sets[places[places < len(self.tags)]])
        label = int(met[0]) if len(met) else int(self.sets.max(initial=-1)) + 1
        if len(met) > 1:
            self.sets[np.isin(self.sets, met)] = label
            self.merged += 1
        if len(new):
            self.tags = np.concatenate([self.tags, new[np.argsort(rank)]])
            self.sets = np.concatenate([self.sets, np.full(len(new), label, np.int64)])
            self._order = np.argsort(self.tags, kind="stable")
        return places


def _read(folder: Path, digest: str) -> npt.NDArray[np.void]:
    """Returns the tags of a table's rows. Raises InputError."""
    path = folder / people.FOLDER / digest
    try:
        return np.frombuffer(people.read(path, digest), _TAG)
    except ValueError:
        raise InputError(Code.FILE_INVALID, f"{path}: is no list of people; restore it") from None


def tagged(secret: bytes, ids: Iterable[str]) -> npt.NDArray[np.void]:
    """Returns the tags of ids, [N]."""
    return np.frombuffer(b"".join([people.tag(secret, each) for each in ids]), _TAG)
