"""The hub's database: members, invitations, proposals, votes and events. It never has data, ids or
keys. SQLite by default, or any database of SQLAlchemy by URL, such as PostgreSQL.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, InterfaceError, OperationalError, SQLAlchemyError

from vfl_common.errors import Code, InputError, UnwritableError
from vfl_common.text import clean
from vfl_hub.schedule import ENDED, MOVES, MOVES_ON, State

_TABLES = sql.MetaData()
_MEMBERS = sql.Table(
    "members",
    _TABLES,
    sql.Column("name", sql.String(64), primary_key=True),
    sql.Column("pin", sql.String(80), nullable=False),
    sql.Column("collaborations", sql.Text, nullable=False),
    sql.Column("since", sql.Float, nullable=False),
)
_INVITES = sql.Table(
    "invites",
    _TABLES,
    sql.Column("secret", sql.String(64), primary_key=True),
    sql.Column("name", sql.String(64), nullable=False),
    sql.Column("collaborations", sql.Text, nullable=False),
    sql.Column("until", sql.Float, nullable=False),
    sql.Column("request", sql.Text),
    sql.Column("certificate", sql.Text),
)
_PROPOSALS = sql.Table(
    "proposals",
    _TABLES,
    sql.Column("id", sql.String(64), primary_key=True),
    sql.Column("position", sql.Integer, nullable=False),
    sql.Column("by", sql.String(64), nullable=False),
    sql.Column("name", sql.String(200), nullable=False),
    sql.Column("parties", sql.Text, nullable=False),
    sql.Column("envelope", sql.Text, nullable=False),
    sql.Column("state", sql.String(16), nullable=False),
    sql.Column("reason", sql.Text, nullable=False),
    sql.Column("until", sql.Float, nullable=False),
    sql.Column("changed", sql.Integer, nullable=False),
    sql.Column("begun", sql.Float),
    sql.Column("ended", sql.Float),
)
_VOTES = sql.Table(
    "votes",
    _TABLES,
    sql.Column("proposal", sql.String(64), primary_key=True),
    sql.Column("party", sql.String(64), primary_key=True),
    sql.Column("kind", sql.String(16), primary_key=True),
    sql.Column("envelope", sql.Text, nullable=False),
)
_EVENTS = sql.Table(
    "events",
    _TABLES,
    sql.Column("number", sql.Integer, primary_key=True, autoincrement=True),
    sql.Column("at", sql.Float, nullable=False),
    sql.Column("proposal", sql.String(64), nullable=False),
    sql.Column("what", sql.Text, nullable=False),
)


@dataclass(frozen=True)
class StoredProposal:
    """A proposal as the hub stores it.

    ``envelope``, ``votes``: JSON objects; ``votes`` has {kind: envelope} for each party.
    """

    id: str
    by: str
    name: str
    parties: tuple[str, ...]
    envelope: dict[str, Any]
    state: State
    reason: str
    until: float
    begun: float | None
    ended: float | None
    changed: int
    votes: dict[str, dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Returns what nodes receive."""
        return {**vars(self), "parties": list(self.parties)}


class Store:
    """The database. Only one thread may use it.

    Args:
        url: The URL of the database for SQLAlchemy.
    """

    def __init__(self, url: str) -> None:
        self._engine = sql.create_engine(url, pool_pre_ping=True)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _make_durable)
        with self._begin() as rows:
            _TABLES.create_all(rows)

    @contextmanager
    def _begin(self) -> Iterator[sql.Connection]:
        try:
            with self._engine.begin() as rows:
                yield rows
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            text = clean(str(getattr(error, "orig", error)))
            # A disk may have room later, and a database may come back.
            passes = isinstance(error, OperationalError | InterfaceError)
            kind = UnwritableError if passes else InputError
            raise kind(
                Code.FILE_INVALID, f"the hub's database: cannot be used ({text}). Check it."
            ) from None

    def close(self) -> None:
        """Closes the database."""
        self._engine.dispose()

    def invite(self, secret: str, name: str, collaborations: Sequence[str], until: float) -> None:
        """Adds an invitation. ``secret``: The SHA-256 of the token's secret."""
        with self._begin() as rows:
            rows.execute(
                _INVITES.insert().values(
                    secret=secret,
                    name=name,
                    collaborations=json.dumps([*collaborations]),
                    until=until,
                )
            )

    def find_invite(self, secret: str) -> dict[str, Any] | None:
        """Returns an invitation by the SHA-256 of its secret."""
        with self._begin() as rows:
            row = rows.execute(_INVITES.select().where(_INVITES.c.secret == secret)).first()
        return dict(row._mapping) if row is not None else None

    def list_requests(self) -> list[dict[str, Any]]:
        """Returns the invitations whose members have sent a request and have no certificate."""
        chosen = _INVITES.select().where(
            _INVITES.c.request.is_not(None), _INVITES.c.certificate.is_(None)
        )
        with self._begin() as rows:
            return [dict(row._mapping) for row in rows.execute(chosen)]

    def set_request(self, secret: str, request: str) -> bool:
        """Stores the request of an invited member. Returns False if there is another one."""
        with self._begin() as rows:
            rows.execute(
                _INVITES.update()
                .where(_INVITES.c.secret == secret, _INVITES.c.request.is_(None))
                .values(request=request)
            )
            row = rows.execute(_INVITES.select().where(_INVITES.c.secret == secret)).one()
        return bool(row.request == request)

    def admit(self, invite: dict[str, Any], certificate: str, pin: str) -> None:
        """Makes an invited party a member."""
        with self._begin() as rows:
            rows.execute(
                _INVITES.update()
                .where(_INVITES.c.secret == invite["secret"])
                .values(certificate=certificate)
            )
            rows.execute(_MEMBERS.delete().where(_MEMBERS.c.name == invite["name"]))
            rows.execute(
                _MEMBERS.insert().values(
                    name=invite["name"],
                    pin=pin,
                    collaborations=invite["collaborations"],
                    since=time.time(),
                )
            )

    def add_member(self, name: str, pin: str, collaborations: Sequence[str]) -> None:
        """Adds a member whose certificate was signed elsewhere, or replaces its pin."""
        invite = {"secret": "", "name": name, "collaborations": json.dumps([*collaborations])}
        self.admit(invite, "", pin)

    def remove_member(self, name: str) -> bool:
        """Removes a member, and stops its proposals and runs. Returns whether it was a member."""
        if name not in self.members():
            return False
        with self._begin() as rows:
            rows.execute(_MEMBERS.delete().where(_MEMBERS.c.name == name))
        for entry in self.entries(MOVES_ON):
            if name in (entry.by, *entry.parties):
                # The hub may end it meanwhile.
                with suppress(ValueError):
                    self.move(entry.id, "stopped", f"{name} is not a member any more")
        return True

    def members(self) -> dict[str, tuple[str, frozenset[str]]]:
        """Returns {name: (pin, collaborations)}."""
        with self._begin() as rows:
            return {
                row.name: (row.pin, frozenset(json.loads(row.collaborations)))
                for row in rows.execute(_MEMBERS.select())
            }

    def propose(
        self,
        number: str,
        by: str,
        name: str,
        parties: Sequence[str],
        envelope: dict[str, Any],
        until: float,
    ) -> None:
        """Adds a proposal; does nothing if it is known. See ``StoredProposal``."""
        with self._begin() as rows:
            known = rows.execute(_PROPOSALS.select().where(_PROPOSALS.c.id == number)).first()
            if known is not None:
                return
            event_number = self._note(rows, number, f"proposed by {by}")
            rows.execute(
                _PROPOSALS.insert().values(
                    id=number,
                    position=event_number,
                    by=by,
                    name=name,
                    parties=json.dumps(parties),
                    envelope=json.dumps(envelope),
                    state="open",
                    reason="",
                    until=until,
                    changed=event_number,
                )
            )

    def vote(self, proposal: str, party: str, kind: str, envelope: dict[str, Any]) -> bool:
        """Adds a vote. Returns False if it is known."""
        with self._begin() as rows:
            same = (_VOTES.c.proposal == proposal, _VOTES.c.party == party, _VOTES.c.kind == kind)
            if rows.execute(_VOTES.select().where(*same)).first() is not None:
                return False
            rows.execute(
                _VOTES.insert().values(
                    proposal=proposal, party=party, kind=kind, envelope=json.dumps(envelope)
                )
            )
            self._change(rows, proposal, f"{kind}: {party}", {})
        return True

    def move(self, proposal: str, state: State, reason: str = "") -> None:
        """Changes the state of a proposal. Raises ValueError for a change that ``MOVES`` lacks."""
        with self._begin() as rows:
            row = rows.execute(_PROPOSALS.select().where(_PROPOSALS.c.id == proposal)).one()
            if state not in MOVES[row.state]:
                raise ValueError(f"{proposal[:12]}: cannot become {state} (it is {row.state})")
            values: dict[str, Any] = {"state": state, "reason": reason}
            if state == "running":
                values["begun"] = time.time()
            if state in ENDED:
                values["ended"] = time.time()
            self._change(rows, proposal, f"{state}: {reason}" if reason else state, values)

    def entries(
        self, states: Collection[str] | None = None, *, after: int = -1, ids: Sequence[str] = ()
    ) -> list[StoredProposal]:
        """Returns proposals in the order in which they were made.

        Args:
            states: Only those in these states; None for all.
            after: Only those that changed after the event of this number.
            ids: Only these; () for all.
        """
        chosen = _PROPOSALS.select().where(_PROPOSALS.c.changed > after)
        if states is not None:
            chosen = chosen.where(_PROPOSALS.c.state.in_(states))
        if ids:
            chosen = chosen.where(_PROPOSALS.c.id.in_(ids))
        with self._begin() as rows:
            found_rows = rows.execute(chosen.order_by(_PROPOSALS.c.position)).all()
            votes: dict[str, dict[str, dict[str, Any]]] = {}
            voted = _VOTES.select().where(_VOTES.c.proposal.in_([row.id for row in found_rows]))
            for row in rows.execute(voted):
                party = votes.setdefault(row.proposal, {}).setdefault(row.party, {})
                party[row.kind] = json.loads(row.envelope)
        return [
            StoredProposal(
                row.id,
                row.by,
                row.name,
                tuple(json.loads(row.parties)),
                json.loads(row.envelope),
                row.state,
                row.reason,
                row.until,
                row.begun,
                row.ended,
                row.changed,
                votes.get(row.id, {}),
            )
            for row in found_rows
        ]

    @property
    def last_event(self) -> int:
        """The number of the last event."""
        with self._begin() as rows:
            return int(rows.execute(sql.select(sql.func.max(_EVENTS.c.number))).scalar() or 0)

    def events(self, proposal: str) -> list[tuple[float, str]]:
        """Returns the times and words of the events of a proposal."""
        chosen = _EVENTS.select().where(_EVENTS.c.proposal == proposal).order_by(_EVENTS.c.number)
        with self._begin() as rows:
            return [(row.at, row.what) for row in rows.execute(chosen)]

    def _change(
        self, rows: sql.Connection, proposal: str, what: str, values: dict[str, Any]
    ) -> None:
        number = self._note(rows, proposal, what)
        rows.execute(
            _PROPOSALS.update().where(_PROPOSALS.c.id == proposal).values(changed=number, **values)
        )

    def _note(self, rows: sql.Connection, proposal: str, what: str) -> int:
        added = rows.execute(
            _EVENTS.insert().values(at=time.time(), proposal=proposal, what=clean(what))
        )
        key = added.inserted_primary_key
        assert key is not None  # noqa: S101 - the table has one
        return int(key[0])


def open_store(folder: Path, url: str = "") -> Store:
    """Opens the database of ``url``, or ``hub.sqlite`` in the hub's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return Store(url or f"sqlite:///{folder / 'hub.sqlite'}")


def _make_durable(connection: Any, _record: Any) -> None:
    """An accepted proposal must survive a crash; several processes may use the file."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA busy_timeout = 10000")
