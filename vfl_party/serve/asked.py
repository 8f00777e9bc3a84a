"""The ids of a question that a passive party looks up. The day's limit counts all ids first, and
the active party learns nothing about those that are not looked up.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_party.align.state import read_common_rows
from vfl_party.base.kept import KeptFile
from vfl_party.record import people
from vfl_party.record.book import LINES, secret_of
from vfl_party.record.lines import TAG

# A party with a small table must be able to serve, too.
_MIN_ASKED = 10_000
# A day may score every row of the table once, and ask as often for single ids.
_TABLES_A_DAY = 2
# The share of a day's limit that is counted at once.
_SHARES = 100

# Returns the ids of a question that may be looked up, in their order; None in place of the others.
LooksUp: TypeAlias = Callable[[Sequence[str]], Sequence[str | None]]
every_id: LooksUp = list


class AskedADay(KeptFile):
    """Counts the ids that are asked for in a day (UTC), known or not, in a file of the party's own.

    The file counts a hundredth of the limit at once, because a question must not wait for the disk.
    What a program has not used of that when it ends counts as asked.

    Args:
        path: of the file, which is made if it is missing.
        max_ids: limit of ids per day.
    """

    def __init__(self, path: Path, max_ids: int) -> None:
        super().__init__(path, "asked (day INTEGER PRIMARY KEY, count INTEGER)")
        self.most, self._share = max_ids, -(-max_ids // _SHARES)
        self._counting = threading.Lock()
        self._day, self._spent = 0, False
        self._left: int = 0

    def take(self, ids: int) -> int:
        """Counts ids that are asked for; returns how many of them are within the limit."""
        with self._counting:
            day = _day()
            if day != self._day:
                self._day, self._left, self._spent = day, 0, False
            if self._left < ids and not self._spent:
                self._left += self._count(max(ids - self._left, self._share))
            within = min(ids, self._left)
            self._left -= within
            return within

    def _count(self, wanted: int) -> int:
        """Counts ids of the day in the file, as far as the limit allows; returns how many."""
        with self.changing() as file:
            file.execute("DELETE FROM asked WHERE day <> ?", (self._day,))
            (before,) = file.execute("SELECT coalesce(sum(count), 0) FROM asked").fetchone()
            granted: int = max(0, min(wanted, self.most - before))
            file.execute("REPLACE INTO asked VALUES (?, ?)", (self._day, before + granted))
        self._spent = granted < wanted
        return granted


class AlignedIds:
    """The ids that alignments of a run have found in common, by their tags in the record: about 110
    bytes of memory an id.

    ``tags``: of the ids; ``secret``: of the record.
    """

    def __init__(self, tags: Iterable[bytes], secret: bytes) -> None:
        self._tags, self._secret = frozenset(tags), secret
        # Those that were asked for, because a tag takes much longer than a look.
        self._met = set[str]()

    def __contains__(self, person: str) -> bool:
        if person in self._met:
            return True
        aligned = people.tag(self._secret, person) in self._tags
        if aligned:
            self._met.add(person)
        return aligned


class AskedIds:
    """Which ids of a question are looked up: see ``LooksUp``.

    Args:
        a_day: counts all ids that are asked for.
        aligned: the only ids that are looked up; None: all.
        advise: shows a sentence to the person here.
    """

    def __init__(
        self, a_day: AskedADay, aligned: AlignedIds | None, advise: Callable[[str], None]
    ) -> None:
        self._a_day, self._aligned, self._advise = a_day, aligned, advise
        self._day_of_advice = 0

    def __call__(self, ids: Sequence[str]) -> Sequence[str | None]:
        """Returns the ids to look up, in their order; None in place of the others."""
        # An empty text is not an id.
        count = len(ids) - ids.count("")
        within = self._a_day.take(count)
        if within < count:
            self._tell()
        elif self._aligned is None:
            return ids
        asked = [at for at, name in enumerate(ids) if name][:within]
        result: list[str | None] = [None] * len(ids)
        aligned = self._aligned
        for at in asked:
            if aligned is None or ids[at] in aligned:
                result[at] = ids[at]
        return result

    def _tell(self) -> None:
        day = _day()
        if day != self._day_of_advice:
            self._day_of_advice = day
            self._advise(
                f"serve.asked_a_day: {self._a_day.most:,} ids were asked for today (UTC), the "
                "limit; no other id is answered before tomorrow"
            )


def _day() -> int:
    """Returns the number of the day (UTC), from 1970 on."""
    return int(time.time()) // 86_400


def daily_limit(setting: int | None, rows: int) -> int:
    """Returns the limit of ids per day. ``setting``: the party file's; ``rows``: of its table."""
    return setting if setting is not None else max(_MIN_ASKED, _TABLES_A_DAY * rows)


def read_aligned_ids(run: Path, out: Path, record: Path) -> AlignedIds:
    """Returns the ids that private set intersection has found for a run: when it was trained, and
    for the joint predictions with it. Raises InputError if none is known.

    Args:
        run: the party's folder of the run.
        out: the folder of the party's runs, with those of its predictions.
        record: the folder of the party's record.
    """
    name, run_id = run.name, run.resolve().parent.name
    tags = set[bytes]()
    for other, (digest, rows) in tables(record).items():
        folder = run if other == run_id else out / other / name
        if other != run_id and not _predicts_with(folder, run_id):
            continue
        common = read_common_rows(folder, rows)
        if common is not None:
            path = record / people.FOLDER / digest
            tags.update(np.frombuffer(people.read(path, digest), TAG)[common].tolist())
    if not tags:
        raise InputError(
            Code.FILE_INVALID,
            f'serve.ids = "aligned": {record} and {run} do not say which ids were aligned. Restore '
            'both folders, or set serve.ids = "all" to answer for every id of the table.',
        )
    return AlignedIds(tags, secret_of(record))


def tables(record: Path) -> dict[str, tuple[str, int]]:
    """Returns {run: the digest of the tags of its table's ids, and how many these are}."""
    result = {}
    for line in _people_lines(record / LINES):
        if line.get("what") == "table":
            result[str(line["run"])] = str(line["people"]), int(line["rows"])
    return result


def _people_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                # Most lines tell of something that was sent, and need not be read.
                if line.startswith(b'{"people":'):
                    yield json.loads(line)
    except FileNotFoundError:
        return


def _predicts_with(folder: Path, run_id: str) -> bool:
    """Whether a folder is that of a joint prediction with a run."""
    return RunFolder(folder, folder.parent.name).facts().get("trained_run") == run_id
