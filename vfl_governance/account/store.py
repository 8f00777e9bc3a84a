"""The file of the account, an SQLite file next to the record that only its owner may read, and the
table of what is spent.

The file has totals and the number of the record's lines that they include. A program that opens it
first adds the record's new lines, so the totals include what a killed program has sent. Only one
program adds lines at a time, and other programs wait.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from vfl_common.config.policy import AccountLimits
from vfl_common.errors import Code, InputError
from vfl_common.text import align_columns, to_json
from vfl_governance.account.sums import (
    BARE,
    OF_A_PERSON,
    OF_ALL,
    AccountSums,
    Persons,
    RunSum,
    worst,
)
from vfl_party.base.mechanism import Mechanism
from vfl_party.record.book import LINES
from vfl_party.record.history import Disclosure, PrivateStep, RecordHistory, RecordReader

FILE = "account.sqlite"
# The maximum time to wait for another program that is reading a long record.
_WAIT_S = 600.0
_TABLES = (
    "position (one INTEGER PRIMARY KEY CHECK (one = 0), record TEXT, lines INTEGER, bytes INTEGER)",
    "known (kind TEXT, name TEXT, line TEXT, PRIMARY KEY (kind, name))",
    "people (one INTEGER PRIMARY KEY CHECK (one = 0), tags BLOB, sets BLOB)",
    "of (peer TEXT, what TEXT, numbers BLOB, PRIMARY KEY (peer, what))",
    "runs (peer TEXT, run TEXT, sums TEXT, PRIMARY KEY (peer, run))",
    "private (run TEXT, phase TEXT, keys TEXT, steps INTEGER, PRIMARY KEY (run, phase, keys))",
)


@dataclass
class Standing:
    """The totals of the first ``lines`` lines of a record, which end at the offset ``at``."""

    folder: Path
    sums: AccountSums
    reader: RecordReader
    lines: int = 0
    at: int = 0

    def __post_init__(self) -> None:
        self._path = self.folder / LINES
        self._history: RecordHistory | None = None

    def catch_up(self) -> bool:
        """Adds the new lines of the record, and returns whether there are any.

        Raises InputError if the record cannot be read.
        """
        # This is called before every bundle. Before the first run there is no record.
        try:
            if self._path.stat().st_size == self.at:
                return False
        except FileNotFoundError:
            return False
        lines = self.lines
        self._history = self._history or RecordHistory(self.folder)
        for line, end in self._history.lines(self.reader, self.lines, self.at):
            if line is not None:
                self._add(line)
            self.lines, self.at = self.lines + 1, end
        return self.lines > lines

    def take(self, line: Disclosure | PrivateStep, begin: int, end: int) -> None:
        """Adds a line that this process has just written, so that it need not be read.

        If another program wrote a line before it, both lines are read later.
        """
        if begin == self.at:
            self._add(line)
            self.lines, self.at = self.lines + 1, end

    def _add(self, line: Disclosure | PrivateStep) -> None:
        """Adds the amounts of a line. Raises InputError if its privacy cost is invalid."""
        cost = line.cost if isinstance(line, PrivateStep) else line.way.cost
        if cost or isinstance(line, PrivateStep):
            try:
                Mechanism.read(cost)
            except ValueError:
                raise InputError(
                    Code.FILE_INVALID,
                    f"{self._path}: line {self.lines + 1} has an invalid cost. Restore the file "
                    "from a backup.",
                ) from None
        self.sums.add(line)


def standing(folder: Path) -> Standing:
    """Returns the account with all lines of a record, and stores it.

    ``folder``: The folder of the record. Raises InputError if there is no record, or if the account
    belongs to another record.
    """
    record = _read_record_id(folder)
    with _open_account(folder / FILE) as file:
        try:
            account = _read_account(file, folder, record)
            account.sums.check()
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                Code.FILE_INVALID,
                f"{folder / FILE}: not a valid account. Move it away; it is created again from the "
                "record.",
            ) from None
        known_lines = dict(account.reader.known)
        if account.catch_up():
            new_lines = {
                key: line
                for key, line in account.reader.known.items()
                if known_lines.get(key) != line
            }
            _write_account(file, account, record, new_lines)
    return account


def _read_record_id(folder: Path) -> str:
    """Returns the identity of a record. Raises InputError if there is no valid record."""
    # The constructor raises InputError if there is no record.
    RecordHistory(folder)
    try:
        with (folder / LINES).open("rb") as file:
            return str(json.loads(file.readline())["record"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / LINES}: not a valid record. Restore it from a backup.",
        ) from None


@contextlib.contextmanager
def _open_account(path: Path) -> Iterator[sqlite3.Connection]:
    """Opens the file and yields it in an exclusive write transaction."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        file = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)
        with contextlib.closing(file):
            # The transaction begins before the first read, so that a second program sees what the
            # first has added.
            file.execute("BEGIN IMMEDIATE")
            try:
                for table in _TABLES:
                    file.execute(f"CREATE TABLE IF NOT EXISTS {table}")
                yield file
                file.execute("COMMIT")
            finally:
                if file.in_transaction:
                    file.execute("ROLLBACK")
    except (sqlite3.Error, OSError) as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be used to store the account ({error}). If it is damaged, move it "
            "away; it is created again from the record.",
        ) from None


def _read_account(file: sqlite3.Connection, folder: Path, record: str) -> Standing:
    position = file.execute("SELECT record, lines, bytes FROM position").fetchone()
    if position is None:
        return Standing(folder, AccountSums(Persons(folder)), RecordReader())
    record_id, lines, offset = position[0], int(position[1]), int(position[2])
    if record_id != record or offset > (folder / LINES).stat().st_size:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / FILE}: counts {lines:,} lines of a record, but the record in this folder "
            "is another record or has lost its end. Restore the record, or move the account away "
            "to count only what this record has.",
        )
    known_lines = {
        (kind, name): json.loads(line)
        for kind, name, line in file.execute("SELECT kind, name, line FROM known ORDER BY rowid")
    }
    (people,) = file.execute("SELECT tags, sets FROM people").fetchall() or [(b"", b"")]
    sums = AccountSums(
        Persons(folder, *people),
        {
            (peer, what): np.frombuffer(numbers, np.int64).copy()
            for peer, what, numbers in file.execute("SELECT peer, what, numbers FROM of")
        },
        {
            (peer, run): RunSum(**json.loads(sums))
            for peer, run, sums in file.execute("SELECT peer, run, sums FROM runs ORDER BY rowid")
        },
        {
            (run, phase, keys): steps
            for run, phase, keys, steps in file.execute(
                "SELECT run, phase, keys, steps FROM private"
            )
        },
    )
    return Standing(folder, sums, RecordReader(known_lines), lines, offset)


def _write_account(
    file: sqlite3.Connection,
    account: Standing,
    record: str,
    new_lines: dict[tuple[str, str], dict[str, object]],
) -> None:
    sums, persons = account.sums, account.sums.persons
    file.execute(
        "REPLACE INTO position VALUES (0, ?, ?, ?)",
        (record, account.lines, account.at),
    )
    file.executemany(
        "REPLACE INTO known VALUES (?, ?, ?)",
        ((*key, to_json(line, compact=True)) for key, line in new_lines.items()),
    )
    file.execute(
        "REPLACE INTO people VALUES (0, ?, ?)", (persons.tags.tobytes(), persons.sets.tobytes())
    )
    file.executemany(
        "REPLACE INTO of VALUES (?, ?, ?)",
        ((*key, numbers[: len(persons)].tobytes()) for key, numbers in sums.of.items()),
    )
    file.executemany(
        "REPLACE INTO runs VALUES (?, ?, ?)",
        ((*key, to_json(asdict(run), compact=True)) for key, run in sums.runs.items()),
    )
    file.executemany(
        "REPLACE INTO private VALUES (?, ?, ?, ?)",
        ((*key, steps) for key, steps in sums.taken.items()),
    )


# {key of a limit: its heading}, in the order of the table.
KEYS = {
    "epsilon": "ε",
    "numbers_of_a_person": "numbers a person",
    "bytes_of_a_person": "bytes a person",
    "bytes": "bytes",
    "split_bits": "split bits a person",
    "alignments": "alignments",
    "predictions": "predictions",
    "predictions_of_a_person": "predictions a person",
    "asked": "ids asked for",
}


_WITHOUT_PRIVACY = "without privacy"


_HEAD = ("data set", "people", "peer", "runs", "since", "what", "spent", "limit", "left")


_NUMBERS = ("data set", "people", "runs", "spent", "limit", "left")


@dataclass(frozen=True)
class Spent:
    """The amounts that one peer has received about one data set.

    Args:
        data_set: The number of the data set. 0 is for bundles that are about no people.
        people: The number of people in the data set.
        peer: The peer.
        runs: The number of runs.
        spent: {key of a limit: amount}. For limits per person it is the maximum over people.
        uncovered: The maximum count of numbers about a person without differential privacy.
        first: The time of the first bundle in seconds since 1970.
        last: The time of the last bundle in seconds since 1970.
    """

    data_set: int
    people: int
    peer: str
    runs: int
    spent: dict[str, float]
    uncovered: int
    first: float
    last: float

    def fields(self, limits: AccountLimits) -> dict[str, Any]:
        """Returns the values for JSON, with the limits and the remaining amounts."""
        limits_ = limits.amounts
        return {
            "data_set": self.data_set,
            "people": self.people,
            "peer": self.peer,
            "runs": self.runs,
            "delta": limits.delta,
            "spent": {
                name: None if math.isinf(value) else value for name, value in self.spent.items()
            },
            "limits": limits_,
            "left": {name: max(0, limit - self.spent[name]) for name, limit in limits_.items()},
            _WITHOUT_PRIVACY.replace(" ", "_"): self.uncovered,
            "first": self.first,
            "last": self.last,
        }


def sum_spent(sums: AccountSums, delta: float) -> Iterator[Spent]:
    """Yields the spent amounts for each data set and peer. ``delta``: The δ of ε."""
    persons = sums.persons
    names = np.unique(persons.sets).tolist()
    for number, data_set in enumerate([-1, *names]):
        person_numbers = np.flatnonzero(persons.sets == data_set)
        for peer in sums.peers:
            runs = [
                run
                for (to, _), run in sums.runs.items()
                if to == peer and sums.data_set(run.person) == data_set
            ]
            if not runs:
                continue
            amounts: dict[str, float] = dict.fromkeys(KEYS, 0)
            for what in OF_A_PERSON:
                amounts[what] = int(sums.vector(peer, what)[person_numbers].max(initial=0))
            for what in OF_ALL:
                amounts[what] = sum(getattr(run, what) for run in runs)
            amounts["epsilon"] = worst(
                [(mechanism, first[person_numbers]) for mechanism, first in sums.costs(peer)], delta
            )
            without_privacy = int(sums.vector(peer, BARE)[person_numbers].max(initial=0))
            first = min((run.first for run in runs if run.first), default=0.0)
            last = max(run.last for run in runs)
            yield Spent(
                number, len(person_numbers), peer, len(runs), amounts, without_privacy, first, last
            )


def table(spent_: Iterable[Spent], limits: AccountLimits) -> list[str]:
    """Returns a table with a header and a line for each data set, peer and limit."""
    limits_ = limits.amounts
    rows: list[tuple[str, ...]] = [_HEAD]
    for row in spent_:
        row_start = (
            str(row.data_set),
            f"{row.people:,}",
            row.peer,
            f"{row.runs:,}",
            _format_day(row.first),
        )
        for key, heading in KEYS.items():
            value, limit = row.spent[key], limits_.get(key)
            if not value and limit is None:
                continue
            remaining = "" if limit is None else _format_amount(max(0, limit - value))
            limit_text = "no limit" if limit is None else _format_amount(limit)
            name = f"{heading} at δ = {limits.delta:g}" if key == "epsilon" else heading
            rows.append((*row_start, name, _format_amount(value), limit_text, remaining))
        if row.uncovered:
            rows.append(
                (
                    *row_start,
                    f"numbers a person, {_WITHOUT_PRIVACY}",
                    _format_amount(row.uncovered),
                    "",
                    "",
                )
            )
    return align_columns(rows, _NUMBERS)


def _format_amount(value: float) -> str:
    """Formats an amount. ε is rounded up."""
    if isinstance(value, int):
        return f"{value:,}"
    return "∞" if math.isinf(value) else f"{math.ceil(round(value * 1000, 6)) / 1000:g}"


def _format_day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d") if at else ""
