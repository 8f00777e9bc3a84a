"""The file of the account, an SQLite file next to the record that only its owner may read.

It has totals and the number of the record's lines that they include. A program that opens the file
first adds the record's new lines, so the totals include what a killed program has sent. Only one
program adds lines at a time, and other programs wait.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_common.text import to_json
from vfl_governance.account.persons import Persons
from vfl_governance.account.sums import AccountSums, RunSum
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
