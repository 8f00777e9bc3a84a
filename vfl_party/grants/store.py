"""The grants that a party has signed, how much of each is used, and what peers have shown:
``.grants-NAME`` in the folder of the record, for its owner alone.

Each grant is a file that never changes. What changes is in one SQLite file, so that several
programs of the party count at once, and a killed one leaves what it has counted.
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
from vfl_common.identity.envelope import Envelope
from vfl_common.text import make_printable, to_json
from vfl_party.base.kept import KeptFile
from vfl_party.grants import grant as grants
from vfl_party.grants.grant import Grant

SECRET, USES = "table.secret", "uses.sqlite"
_TABLES = (
    "runs (grant_id TEXT, run TEXT, PRIMARY KEY (grant_id, run)) WITHOUT ROWID",
    "predicted (grant_id TEXT, run TEXT, rows INTEGER, PRIMARY KEY (grant_id, run)) WITHOUT ROWID",
    "revoked (grant_id TEXT PRIMARY KEY, at REAL, why TEXT) WITHOUT ROWID",
    "shown (party TEXT, grant_id TEXT, run TEXT, PRIMARY KEY (party, grant_id, run)) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Uses:
    """How much of a grant is used: the runs that were begun, the rows that were predicted, and when
    and why it was revoked, if it was.
    """

    runs: frozenset[str] = frozenset()
    predictions: int = 0
    revoked_s: float | None = None
    why: str = ""


@dataclass(frozen=True)
class KeptGrant:
    """A grant with its envelope."""

    grant: Grant
    envelope: Envelope


def folder_of(beside: Path, name: str) -> Path:
    """Returns the folder of a party's grants; it is not the folder of a run."""
    return beside / f".grants-{name}"


class GrantStore:
    """A party's folder of grants; any thread may call it.

    Args:
        folder: it is made if it is missing.
        name: the party's.

    Raises InputError if it cannot be used.
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
        """The key of the digests of the table. Raises InputError."""
        return load_or_create_secret(self.folder / SECRET, secrets.token_bytes(32))

    def close(self) -> None:
        """Closes the file of uses."""
        self._file.close()

    def add(self, grant: Grant, credentials: Credentials) -> Path:
        """Signs a grant and keeps it; returns its file. Raises InputError."""
        text = to_json(grants.sign_grant(grant, credentials).value) + "\n"
        path = self._path(grant.grant)
        with private_file(path) as file:
            file.write(text.encode())
        return path

    def all(self, credentials: Credentials) -> list[KeptGrant]:
        """Returns all grants, the newest first. Raises InputError if a file was changed since it
        was signed.
        """
        paths = self.folder.glob("[!.]*.json")
        grants_ = [self._read(path, credentials) for path in paths]
        return sorted(grants_, key=lambda grant: (grant.grant.at, grant.grant.grant), reverse=True)

    def find(self, name: str, credentials: Credentials) -> KeptGrant:
        """Returns the one grant whose id begins with ``name``. Raises InputError if there is not
        exactly one.
        """
        known = self.all(credentials)
        matches = [grant for grant in known if name and grant.grant.grant.startswith(name)]
        if len(matches) != 1:
            ids = ", ".join(grant.grant.grant for grant in known) or "none"
            raise InputError(
                Code.CONFIG_INVALID,
                f"{self.folder}: the beginning of an id must fit one grant "
                f"(got {make_printable(name)!r}, which fits {len(matches)}). Choose one of: {ids}.",
            )
        return matches[0]

    def _path(self, id_: str) -> Path:
        return self.folder / f"{id_}.json"

    def _read(self, path: Path, credentials: Credentials) -> KeptGrant:
        grant = read_file(path, credentials)
        if grant.grant.party != self.name or path != self._path(grant.grant.grant):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: has the grant {grant.grant.grant} of {grant.grant.party}, which belongs "
                "under another name. Move it away.",
            )
        return grant

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._file.changing() as file:
                yield file
        except sqlite3.Error as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self.folder / USES}: cannot be used ({error}), and nothing leaves without a "
                "grant. Free some disk space, or restore the file.",
            ) from None

    def uses(self, id_: str) -> Uses:
        """Returns how much of a grant is used. Raises InputError."""
        with self._changing() as file:
            return _uses(file, id_)

    def count_run(self, grant: Grant, run: str) -> bool:
        """Counts a run, once. Returns whether the grant allows it: none is counted that it does not
        allow. Raises InputError.
        """
        with self._changing() as file:
            uses = _uses(file, grant.grant)
            allowed = uses.revoked_s is None and (run in uses.runs or len(uses.runs) < grant.runs)
            if allowed:
                file.execute("INSERT OR IGNORE INTO runs VALUES (?, ?)", (grant.grant, run))
            return allowed

    def take_rows(self, grant: Grant, run: str, rows: int, *, whole: bool = False) -> int:
        """Counts predicted rows, as far as the grant still allows some. Returns how many it has
        counted. Raises InputError. ``whole``: all or none.
        """
        with self._changing() as file:
            uses = _uses(file, grant.grant)
            left = max(0, grant.predictions - uses.predictions)
            taken = min(rows, left) if uses.revoked_s is None else 0
            if whole and taken < rows:
                taken = 0
            if taken:
                file.execute(
                    "INSERT INTO predicted VALUES (?, ?, ?) "
                    "ON CONFLICT (grant_id, run) DO UPDATE SET rows = rows + excluded.rows",
                    (grant.grant, run, taken),
                )
            return taken

    def revoke(self, id_: str, why: str) -> bool:
        """Ends a grant for good. Returns whether it was not revoked before. Raises InputError."""
        with self._changing() as file:
            done = file.execute(
                "INSERT OR IGNORE INTO revoked VALUES (?, ?, ?)", (id_, time.time(), why)
            )
            return done.rowcount > 0

    def list_runs_shown(self, party: str, id_: str) -> frozenset[str]:
        """Returns the runs for which a peer has shown a grant. Raises InputError."""
        with self._changing() as file:
            runs = file.execute(
                "SELECT run FROM shown WHERE party = ? AND grant_id = ?", (party, id_)
            ).fetchall()
            return frozenset(run for (run,) in runs)

    def see(self, grant: Grant, run: str) -> None:
        """Counts that a peer has shown a grant for a run, and takes part in it. Raises
        InputError.
        """
        with self._changing() as file:
            row = (grant.party, grant.grant, run)
            file.execute("INSERT OR IGNORE INTO shown VALUES (?, ?, ?)", row)


def read_file(path: Path, credentials: Credentials) -> KeptGrant:
    """Reads the file of a grant, and checks that the party that it names has signed it. Raises
    InputError.
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
    """Reads a grant that a file has, and checks as ``read_file``. Raises InputError that names
    ``path``.
    """
    try:
        envelope, grant = grants.read(value, str(path))
    except (ValueError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a grant of a party. Give a file that `vfl-party approve` wrote.",
        ) from None
    envelope.verify_stored(path, grant.party, credentials)
    return KeptGrant(grant, envelope)


def _uses(file: sqlite3.Connection, id_: str) -> Uses:
    runs = file.execute("SELECT run FROM runs WHERE grant_id = ?", (id_,)).fetchall()
    (rows,) = file.execute(
        "SELECT coalesce(sum(rows), 0) FROM predicted WHERE grant_id = ?", (id_,)
    ).fetchone()
    revoked = file.execute("SELECT at, why FROM revoked WHERE grant_id = ?", (id_,)).fetchone()
    at, why = revoked or (None, "")
    return Uses(frozenset(run for (run,) in runs), int(rows), at, str(why))
