"""Selects the ids of a question that a passive party looks up. The daily limit counts all ids, and
the active party learns nothing about ids that are not looked up.
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
from vfl_party.record.book import LINES, secret_of
from vfl_party.record.lines import PEOPLE_FOLDER, TAG, read_tags, tag_person

# Minimum for the default daily limit, so that a party with a small table can serve.
_MIN_ASKED = 10_000
# The default daily limit in tables: each row may be scored once in bulk and once by single ids.
_TABLES_A_DAY = 2
# The counter reserves this fraction (1/100) of the daily limit at once.
_SHARES = 100

# Returns the ids of a question, in order, with None in place of ids that must not be looked up.
SelectIds: TypeAlias = Callable[[Sequence[str]], Sequence[str | None]]
select_all_ids: SelectIds = list


class DailyIdCounter(KeptFile):
    """Counts the requested ids per day (UTC), known or unknown, in a file of this party.

    It reserves a hundredth of the limit in the file at once, because most questions must not wait
    for the disk. Ids that are reserved when the program ends count as requested.

    Args:
        path: The file, which is created if it is missing.
        max_ids: The maximum number of ids per day.
    """

    def __init__(self, path: Path, max_ids: int) -> None:
        super().__init__(path, "asked (day INTEGER PRIMARY KEY, count INTEGER)")
        self.max_ids, self._reserve_size = max_ids, -(-max_ids // _SHARES)
        self._counting = threading.Lock()
        self._day, self._spent = 0, False
        self._left: int = 0

    def take(self, ids: int) -> int:
        """Counts ``ids`` requested ids; returns how many of them are allowed the limit."""
        with self._counting:
            day = _day()
            if day != self._day:
                self._day, self._left, self._spent = day, 0, False
            if self._left < ids and not self._spent:
                self._left += self._count(max(ids - self._left, self._reserve_size))
            allowed = min(ids, self._left)
            self._left -= allowed
            return allowed

    def _count(self, wanted: int) -> int:
        """Reserves up to ``wanted`` ids in the file, allowed the limit; returns how many."""
        with self.begin_transaction() as file:
            file.execute("DELETE FROM asked WHERE day <> ?", (self._day,))
            (count_before,) = file.execute("SELECT coalesce(sum(count), 0) FROM asked").fetchone()
            granted: int = max(0, min(wanted, self.max_ids - count_before))
            file.execute("REPLACE INTO asked VALUES (?, ?)", (self._day, count_before + granted))
        self._spent = granted < wanted
        return granted


class AlignedIds:
    """The ids that the alignments of a run have found in common. Takes about 110 bytes per id.

    ``tags``: the ids' tags in the record. ``secret``: the record's secret, which makes tags of ids.
    """

    def __init__(self, tags: Iterable[bytes], secret: bytes) -> None:
        self._tags, self._secret = frozenset(tags), secret
        # A cache of requested ids that are aligned: computing a tag is slow.
        self._known_aligned = set[str]()

    def __contains__(self, person: str) -> bool:
        if person in self._known_aligned:
            return True
        aligned = tag_person(self._secret, person) in self._tags
        if aligned:
            self._known_aligned.add(person)
        return aligned


class IdFilter:
    """Selects the ids of a question to look up; a ``SelectIds``.

    Args:
        counter: Counts all requested ids.
        aligned: The ids that may be looked up; None: all ids.
        advise: Shows a sentence to this party's operator.
    """

    def __init__(
        self, counter: DailyIdCounter, aligned: AlignedIds | None, advise: Callable[[str], None]
    ) -> None:
        self._counter, self._aligned, self._advise = counter, aligned, advise
        self._day_of_advice = 0

    def __call__(self, ids: Sequence[str]) -> Sequence[str | None]:
        """Returns the ids to look up, in order, with None in place of other ids."""
        # Empty texts are not ids, so they do not count.
        count = len(ids) - ids.count("")
        allowed = self._counter.take(count)
        if allowed < count:
            self._report_limit()
        elif self._aligned is None:
            return ids
        places = [at for at, name in enumerate(ids) if name][:allowed]
        result: list[str | None] = [None] * len(ids)
        aligned = self._aligned
        for at in places:
            if aligned is None or ids[at] in aligned:
                result[at] = ids[at]
        return result

    def _report_limit(self) -> None:
        day = _day()
        if day != self._day_of_advice:
            self._day_of_advice = day
            self._advise(
                f"serve.asked_a_day: {self._counter.max_ids:,} ids were asked for today (UTC), the "
                "limit; no other id is answered before tomorrow"
            )


def _day() -> int:
    """Returns the number of days (UTC) since 1970."""
    return int(time.time()) // 86_400


def daily_limit(setting: int | None, rows: int) -> int:
    """Returns the maximum number of requested ids per day.

    ``setting``: the value in the party file. ``rows``: the number of rows of the party's table.
    """
    return setting if setting is not None else max(_MIN_ASKED, _TABLES_A_DAY * rows)


def read_aligned_ids(run: Path, out: Path, record: Path) -> AlignedIds:
    """Returns the ids that private set intersection found in a run's training and predictions.

    Args:
        run: This party's folder in the run.
        out: The folder of all runs and predictions of this party.
        record: The folder of this party's record.

    Raises InputError if no aligned id is known.
    """
    name, run_id = run.name, run.resolve().parent.name
    tags = set[bytes]()
    for other, (digest, rows) in read_table_digests(record).items():
        folder = run if other == run_id else out / other / name
        if other != run_id and not _predicts_with(folder, run_id):
            continue
        common = read_common_rows(folder, rows)
        if common is not None:
            path = record / PEOPLE_FOLDER / digest
            tags.update(np.frombuffer(read_tags(path, digest), TAG)[common].tolist())
    if not tags:
        raise InputError(
            Code.FILE_INVALID,
            f'serve.ids = "aligned": {record} and {run} do not say which ids were aligned. Restore '
            'both folders, or set serve.ids = "all" to answer for every id of the table.',
        )
    return AlignedIds(tags, secret_of(record))


def read_table_digests(record: Path) -> dict[str, tuple[str, int]]:
    """Returns {run id: (the digest of the tags of its table's ids, the number of ids)}."""
    result = {}
    for line in _people_lines(record / LINES):
        if line.get("what") == "table":
            result[str(line["run"])] = str(line["people"]), int(line["rows"])
    return result


def _people_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                # Most lines record a sent message and need not be parsed.
                if line.startswith(b'{"people":'):
                    yield json.loads(line)
    except FileNotFoundError:
        return


def _predicts_with(folder: Path, run_id: str) -> bool:
    """Returns whether ``folder`` is a joint prediction with the run."""
    return RunFolder(folder, folder.parent.name).facts().get("trained_run") == run_id
