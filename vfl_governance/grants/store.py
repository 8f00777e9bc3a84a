"""Stores the grants that a party signed, their uses, and the grants that peers sent.

The folder is ``.grants-NAME`` next to the record, and only its owner may read it. Each grant is a
file that never changes. The uses are in one SQLite file, so that several programs of the party can
count at the same time, and the counts survive if a program is killed.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from vfl_common.config.base import Section, match_pattern, parse
from vfl_common.config.policy import Pin
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import load_or_create_secret, private_file, write_error
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.pem import compute_pin
from vfl_common.identity.signing import Envelope, encode_chain
from vfl_common.text import clean, count, make_printable, to_json
from vfl_party.assembly.party import OpenedParty
from vfl_party.base.kept import KeptFile
from vfl_party.data import Table

# The payload type. DSSE signs it together with the grant, so that another signed statement cannot
# be mistaken for a grant.
PAYLOAD = "application/vnd.vfl.grant+json"


MAX_RUNS, MAX_PREDICTIONS, MAX_PURPOSE = 10_000, 1_000_000_000, 500


_ID_BYTES = 6


def _validate_day(text: str) -> str:
    """YYYY-MM-DD"""
    if date.fromisoformat(text).isoformat() != text:
        raise ValueError(f"{text!r} cannot be used. Write a day as 2027-01-31.")
    return text


def _validate_one_line(text: str) -> str:
    """text on one line"""
    if clean(text) != text:
        raise ValueError("the text must be one line of printable characters")
    return text


GrantId = Annotated[
    str, match_pattern(rf"[0-9a-f]{{{2 * _ID_BYTES}}}", "the id of a grant, 12 digits")
]


Digest = Annotated[str, match_pattern(r"[0-9a-f]{64}", "a SHA-256, 64 digits")]


Day = Annotated[str, AfterValidator(_validate_day)]


Purpose = Annotated[str, Field(max_length=MAX_PURPOSE), AfterValidator(_validate_one_line)]


class Grant(Section):
    """The runs and predictions that a party allows.

    Args:
        grant: The id of the grant.
        party: The party that signs the grant.
        recipe: The name of the recipe.
        digest: The SHA-256 of the recipe.
        columns: A keyed digest of the names and kinds of the table's columns. Only the party has
            the key.
        ids: A keyed digest of the table's ids.
        peers: {receiver: pin of its key}.
        phases: The allowed phases of the recipe, and ``predict`` and ``serve``.
        purpose: The purpose, as the person who signs the grant states it.
        until: The last day in UTC.
        runs: The number of runs that may be trained.
        predictions: The number of rows that may be predicted, jointly or by serving.
        at: The time of the signature in seconds since 1970.
    """

    grant: GrantId
    party: Name
    recipe: Annotated[str, Field(max_length=200), AfterValidator(_validate_one_line)]
    digest: Digest
    columns: Digest
    ids: Digest
    peers: dict[Name, Pin]
    phases: tuple[Annotated[str, Field(max_length=200), AfterValidator(_validate_one_line)], ...]
    purpose: Purpose = ""
    until: Day
    runs: Annotated[int, Field(ge=0, le=MAX_RUNS)]
    predictions: Annotated[int, Field(ge=0, le=MAX_PREDICTIONS)]
    at: Annotated[float, Field(ge=0.0, le=1e12)]

    @property
    def ends_s(self) -> float:
        """The end of the day ``until``, in seconds since 1970."""
        day = datetime.combine(date.fromisoformat(self.until), datetime.min.time(), UTC)
        try:
            return (day + timedelta(days=1)).timestamp()
        except OverflowError:
            return day.timestamp()

    @property
    def signed_on(self) -> str:
        """The day on which the grant was signed, in UTC."""
        return day_of(self.at)

    def __str__(self) -> str:
        """Describes in words what the grant allows."""
        allowances = [f"{count(self.runs, 'run')} of recipe {self.recipe}"] if self.runs else []
        allowances += [count(self.predictions, "predicted row")] if self.predictions else []
        purpose = f", for: {self.purpose}" if self.purpose else ""
        return f"{' and '.join(allowances) or 'nothing'} until the end of {self.until} UTC{purpose}"


def new_id() -> str:
    """Returns a random id for a new grant."""
    return secrets.token_hex(_ID_BYTES)


def day_of(at_s: float) -> str:
    """Returns the UTC day YYYY-MM-DD of a time in seconds since 1970."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def sign_grant(grant: Grant, credentials: Credentials) -> Envelope:
    """Signs a grant with the party's key. Raises InputError if the key cannot sign."""
    return Envelope.seal(PAYLOAD, grant.model_dump(mode="json"), credentials)


def read(value: Any, where: str) -> tuple[Envelope, Grant]:
    """Parses a grant and its envelope. Does not verify the signature.

    Raises InputError, which names ``where``, if the grant is invalid, and ValueError if ``value``
    is not an envelope.
    """
    envelope = Envelope.read(value, PAYLOAD)
    fields = envelope.statement
    # pydantic converts the lists of JSON to tuples.
    return envelope, parse(Grant, fields, where)


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
        text = to_json(sign_grant(grant, credentials).value) + "\n"
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
        envelope, grant = read(value, str(path))
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


# The key never leaves the party. Without a key, a peer that has the grant could guess ids or names
# of columns and compare the digests.
def digests(opened: OpenedParty, secret: bytes) -> tuple[str, str]:
    """Returns the hexadecimal digests of the columns and of the ids of a party's table.

    The first digest includes the names and kinds of the columns, the shape of images, and whether
    there are labels. The second includes the ids of all rows, also of rows that only this party
    has.
    """
    tables = [cell for cell in (opened.table, opened.unaligned) if cell is not None]
    columns = (word for table in tables for word in _describe_columns(table))
    ids = (cell for table in tables for cell in ("", *table.ids))
    return _digest(secret, b"columns", columns), _digest(secret, b"ids", ids)


def _describe_columns(table: Table) -> Iterable[str]:
    yield "table"
    yield from (f"number {name}" for name in table.numeric_names)
    yield from (f"category {name}" for name in table.categorical_names)
    if table.images_NCHW is not None:
        yield f"images {list(table.images_NCHW.shape[1:])}"
    if table.labels is not None:
        yield "labels"


def _digest(secret: bytes, what: bytes, words: Iterable[str]) -> str:
    digest = hmac.new(secret, what, sha256)
    for word in words:
        data = word.encode("utf-8", "surrogatepass")
        # The length before each text ensures that two different lists have different bytes.
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.hexdigest()


_SUBJECT = "the grant"


# Each party checks the grants of all other parties. A grant must have the signature of its party,
# be for this recipe, still be valid, and name the key of the checking party. If a party has already
# seen a grant for the allowed number of runs, it does not accept the grant for another run.
@dataclass(frozen=True)
class Joined:
    """The run that all parties have joined.

    Args:
        digest: The digest of the recipe with which the model is or was trained.
        run: The id of the run.
        trains: Whether the run trains. Otherwise it predicts.
        goes_on: Whether this program has already begun the run, or resumes it.
    """

    digest: str
    run: str
    trains: bool
    goes_on: bool = False


def present(grant: KeptGrant, credentials: Credentials) -> dict[str, Any]:
    """Returns the value with its grant that a party sends to all parties."""
    envelope = grant.envelope
    # The party may have a newer certificate for the same key since it signed the grant.
    if compute_pin(credentials.certificate) == envelope.keyid:
        envelope = replace(envelope, chain=encode_chain(credentials).decode())
    return {"approval": "each", "grant": envelope.value}


def check_grants(
    tables: Mapping[str, Any],
    joined: Joined,
    credentials: Credentials,
    shown_in: Callable[[str, str], Collection[str]],
    now_s: float | None = None,
) -> dict[str, KeptGrant]:
    """Checks the grants of the other parties and returns {party: grant}.

    Args:
        tables: {party: result of its ``present``, or None if it needs no grant}.
        joined: The run.
        credentials: This party's credentials.
        shown_in: A function (party, id of a grant) -> the runs for which the party sent the grant.
        now_s: The time in seconds since 1970. Default: now.

    Raises PeerError at the first grant that is invalid or does not allow the run.
    """
    now_s = time.time() if now_s is None else now_s
    grants_ = {}
    for party, value in tables.items():
        if party == credentials.name or value is None or value == {}:
            continue
        grant = _read_grant(party, value, credentials)
        if why := _find_misfit(party, grant.grant, joined, credentials, shown_in, now_s):
            raise _refuse(party, f"the grant of {party} {why}")
        grants_[party] = grant
    return grants_


def _read_grant(party: str, value: Any, credentials: Credentials) -> KeptGrant:
    malformed = PeerError(
        Code.MALFORMED_MESSAGE,
        f"the grant of {party} is malformed. Run the same version of this program at all parties.",
        party=party,
    )
    if not isinstance(value, dict):
        raise malformed
    if value.get("grant") is None:
        raise _refuse(party, f"{party} needs a grant for each run, but sent none")
    try:
        envelope, grant = read(value["grant"], _SUBJECT)
    except (InputError, ValueError):
        raise malformed from None
    envelope.require_shown(party, credentials, _SUBJECT)
    return KeptGrant(grant, envelope)


def _find_misfit(
    party: str,
    grant: Grant,
    joined: Joined,
    credentials: Credentials,
    shown_in: Callable[[str, str], Collection[str]],
    now_s: float,
) -> str:
    if grant.party != party:
        return f"belongs to {grant.party}"
    if grant.digest != joined.digest:
        return "is for another recipe"
    if now_s >= grant.ends_s:
        return f"was valid until the end of {grant.until} (UTC)"
    own_pin = compute_pin(credentials.certificate)
    if grant.peers.get(credentials.name, own_pin) != own_pin:
        return f"is for another key of {credentials.name}"
    if not (grant.runs if joined.trains else grant.predictions):
        return f"allows no {'run' if joined.trains else 'prediction'}"
    if not joined.trains:
        return ""
    runs = {*shown_in(grant.party, grant.grant)}
    if joined.run in runs and not joined.goes_on:
        # The server chooses the id of a run. Using an old id again would not be counted.
        return f"was sent for run {joined.run} before, which this party does not resume"
    if len(runs - {joined.run}) >= grant.runs:
        return f"allows {count(grant.runs, 'run')}, and was sent for this number of other runs"
    return ""


def _refuse(party: str, text: str) -> PeerError:
    return PeerError(
        Code.REFUSED, f"{text}. Ask {party} to sign another with `vfl-party approve`.", party=party
    )
