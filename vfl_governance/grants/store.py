"""Stores the grants that a party signed, their uses, and the grants that peers sent.

The folder is ``.grants-NAME`` next to the record, and only its owner may read it. Each grant is a
file that never changes. The uses are in one SQLite file, so that several programs of the party can
count at the same time, and the counts survive if a program is killed.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.files import load_or_create_secret, private_file, write_error
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import Envelope
from vfl_common.text import make_printable, to_json
from vfl_governance.grants import grant as grants
from vfl_governance.grants.grant import Grant
from vfl_party.base.kept import KeptFile

SECRET, USES = "table.secret", "uses.sqlite"
_TABLES = (
    "runs (grant_id TEXT, run TEXT, PRIMARY KEY (grant_id, run)) WITHOUT ROWID",
    "predicted (grant_id TEXT, run TEXT, rows INTEGER, PRIMARY KEY (grant_id, run)) WITHOUT ROWID",
    "revoked (grant_id TEXT PRIMARY KEY, at REAL, why TEXT) WITHOUT ROWID",
    "shown (party TEXT, grant_id TEXT, run TEXT, PRIMARY KEY (party, grant_id, run)) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Uses:
    """The uses of a grant.

    Args:
        runs: The ids of the runs that were begun.
        predictions: The number of predicted rows.
        revoked_s: The time when the grant was revoked, in seconds since 1970, or None.
        why: The reason why it was revoked.
    """

    runs: frozenset[str] = frozenset()
    predictions: int = 0
    revoked_s: float | None = None
    why: str = ""


@dataclass(frozen=True)
class KeptGrant:
    """A grant with its signed envelope."""

    grant: Grant
    envelope: Envelope


def folder_of(beside: Path, name: str) -> Path:
    """Returns the folder of a party's grants in the folder ``beside``."""
    return beside / f".grants-{name}"


class GrantStore:
    """A party's folder of grants. Any thread may call it.

    Args:
        folder: The folder, which is created if it is missing.
        name: The party's name.

    Raises InputError if the folder cannot be used.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise write_error(folder, error) from None
        self._file = KeptFile(folder / USES, *_TABLES)

    @property
    def secret(self) -> bytes:
        """The key of the table's digests. Raises InputError if it cannot be read or created."""
        return load_or_create_secret(self.folder / SECRET, secrets.token_bytes(32))

    def close(self) -> None:
        """Closes the SQLite file with the uses."""
        self._file.close()

    def add(self, grant: Grant, credentials: Credentials) -> Path:
        """Signs and stores a grant, and returns its file. Raises InputError if this fails."""
        text = to_json(grants.sign_grant(grant, credentials).value) + "\n"
        path = self._path(grant.grant)
        with private_file(path) as file:
            file.write(text.encode())
        return path

    def all(self, credentials: Credentials) -> list[KeptGrant]:
        """Returns all grants, the newest first.

        Raises InputError if the signature of a grant is invalid.
        """
        paths = self.folder.glob("[!.]*.json")
        grants_ = [self._read(path, credentials) for path in paths]
        return sorted(grants_, key=lambda grant: (grant.grant.at, grant.grant.grant), reverse=True)

    def find(self, name: str, credentials: Credentials) -> KeptGrant:
        """Returns the only grant whose id begins with ``name``.

        Raises InputError if there is no such grant or more than one.
        """
        all_grants = self.all(credentials)
        matches = [grant for grant in all_grants if name and grant.grant.grant.startswith(name)]
        if len(matches) != 1:
            ids = ", ".join(grant.grant.grant for grant in all_grants) or "none"
            raise InputError(
                Code.CONFIG_INVALID,
                f"{self.folder}: the beginning of an id must match one grant (got "
                f"{make_printable(name)!r}, which matches {len(matches)}). Choose one of: {ids}.",
            )
        return matches[0]

    def _path(self, id_: str) -> Path:
        return self.folder / f"{id_}.json"

    def _read(self, path: Path, credentials: Credentials) -> KeptGrant:
        grant = read_file(path, credentials)
        if grant.grant.party != self.name or path != self._path(grant.grant.grant):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: this file has the grant {grant.grant.grant} of {grant.grant.party}, so "
                "its name or its folder is wrong. Move it away.",
            )
        return grant

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._file.begin_transaction() as file:
                yield file
        except sqlite3.Error as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self.folder / USES}: cannot be used ({error}), and nothing is sent without a "
                "grant. Free some disk space, or restore the file.",
            ) from None

    def uses(self, id_: str) -> Uses:
        """Returns the uses of a grant. Raises InputError if the file cannot be used."""
        with self._transaction() as file:
            return _read_uses(file, id_)

    def count_run(self, grant: Grant, run: str) -> bool:
        """Counts a run if the grant allows it, and returns whether it does.

        A run is counted only once. Raises InputError if the file cannot be used.
        """
        with self._transaction() as file:
            uses = _read_uses(file, grant.grant)
            is_allowed = uses.revoked_s is None and (
                run in uses.runs or len(uses.runs) < grant.runs
            )
            if is_allowed:
                file.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (grant.grant, run))
            return is_allowed

    def take_rows(self, grant: Grant, run: str, rows: int, *, whole: bool = False) -> int:
        """Counts predicted rows as far as the grant allows them.

        Returns the number of counted rows. ``whole``: Count either all rows or none. Raises
        InputError if the file cannot be used.
        """
        with self._transaction() as file:
            uses = _read_uses(file, grant.grant)
            rows_left = max(0, grant.predictions - uses.predictions)
            counted_rows = min(rows, rows_left) if uses.revoked_s is None else 0
            if whole and counted_rows < rows:
                counted_rows = 0
            if counted_rows:
                file.execute(
                    "INSERT INTO predicted VALUES (?, ?, ?) "
                    "ON CONFLICT (grant_id, run) DO UPDATE SET rows = rows + excluded.rows",
                    (grant.grant, run, counted_rows),
                )
            return counted_rows

    def revoke(self, id_: str, why: str) -> bool:
        """Revokes a grant permanently. Returns False if it was already revoked.

        Raises InputError if the file cannot be used.
        """
        with self._transaction() as file:
            cursor = file.execute(
                "INSERT OR IGNORE INTO revoked VALUES (?, ?, ?)", (id_, time.time(), why)
            )
            return cursor.rowcount > 0

    def list_runs_shown(self, party: str, id_: str) -> frozenset[str]:
        """Returns the ids of the runs for which a peer sent a grant.

        Raises InputError if the file cannot be used.
        """
        with self._transaction() as file:
            runs = file.execute(
                "SELECT run FROM shown WHERE party = ? AND grant_id = ?", (party, id_)
            ).fetchall()
            return frozenset(run for (run,) in runs)

    def see(self, grant: Grant, run: str) -> None:
        """Notes that a peer sent a grant for a run in which it takes part.

        Raises InputError if the file cannot be used.
        """
        with self._transaction() as file:
            row = (grant.party, grant.grant, run)
            file.execute("INSERT OR IGNORE INTO shown VALUES (?, ?, ?)", row)


def read_file(path: Path, credentials: Credentials) -> KeptGrant:
    """Reads a grant's file and verifies the signature of the grant's party.

    Raises InputError if the file cannot be read or the signature is invalid.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.",
        ) from None
    except (ValueError, RecursionError):
        value = None
    return read_kept(value, path, credentials)


def read_kept(value: Any, path: Path, credentials: Credentials) -> KeptGrant:
    """Parses a grant from the JSON ``value`` in a file, and verifies its signature.

    Raises InputError, which names ``path``, if the grant or its signature is invalid.
    """
    try:
        envelope, grant = grants.read(value, str(path))
    except (ValueError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a grant. Give a file that `vfl-party approve` wrote.",
        ) from None
    envelope.verify_stored(path, grant.party, credentials)
    return KeptGrant(grant, envelope)


def _read_uses(file: sqlite3.Connection, id_: str) -> Uses:
    runs = file.execute("SELECT run FROM runs WHERE grant_id = ?", (id_,)).fetchall()
    (rows,) = file.execute(
        "SELECT coalesce(sum(rows), 0) FROM predicted WHERE grant_id = ?", (id_,)
    ).fetchone()
    revoked = file.execute("SELECT at, why FROM revoked WHERE grant_id = ?", (id_,)).fetchone()
    at, why = revoked or (None, "")
    return Uses(frozenset(run for (run,) in runs), int(rows), at, str(why))
