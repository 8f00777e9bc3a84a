"""A grant: what a party has allowed, signed with its key."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from vfl_common.config.base import Section, has_form, parse
from vfl_common.config.policy import Pin
from vfl_common.config.recipe_tables import Name
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.envelope import Envelope
from vfl_common.text import clean, count

# The type is our own; DSSE signs it with the grant, so that no other statement is taken for one.
PAYLOAD = "application/vnd.vfl.grant+json"
MAX_RUNS, MAX_PREDICTIONS, MAX_PURPOSE = 10_000, 1_000_000_000, 500
_ID_BYTES = 6


def _day(text: str) -> str:
    """YYYY-MM-DD"""
    if date.fromisoformat(text).isoformat() != text:
        raise ValueError(f"{text!r} cannot be used. Write a day as 2027-01-31.")
    return text


def _plain(text: str) -> str:
    """text on one line"""
    if clean(text) != text:
        raise ValueError("must be one line of printable characters")
    return text


GrantId = Annotated[str, has_form(rf"[0-9a-f]{{{2 * _ID_BYTES}}}", "the id of a grant, 12 digits")]
Digest = Annotated[str, has_form(r"[0-9a-f]{64}", "a SHA-256, 64 digits")]
Day = Annotated[str, AfterValidator(_day)]
Purpose = Annotated[str, Field(max_length=MAX_PURPOSE), AfterValidator(_plain)]


class Grant(Section):
    """What a party allows.

    Args:
        grant: its id.
        party: the party that allows it.
        recipe, digest: the name of the recipe, and the SHA-256 of it.
        columns, ids: keyed digests of the names and kinds of the columns, and of the ids, of the
            party's table; only the party has the key.
        peers: {receiver: the pin of its key}.
        phases: what may be run: those of the recipe, after alignment; ``predict``; ``serve``.
        purpose: in the words of the person who allows it.
        until: the last day, in UTC.
        runs: how many runs may be trained.
        predictions: how many rows may be predicted, jointly or by serving.
        at: when it was made, in seconds since 1970.
    """

    grant: GrantId
    party: Name
    recipe: Annotated[str, Field(max_length=200), AfterValidator(_plain)]
    digest: Digest
    columns: Digest
    ids: Digest
    peers: dict[Name, Pin]
    phases: tuple[Annotated[str, Field(max_length=200), AfterValidator(_plain)], ...]
    purpose: Purpose = ""
    until: Day
    runs: Annotated[int, Field(ge=0, le=MAX_RUNS)]
    predictions: Annotated[int, Field(ge=0, le=MAX_PREDICTIONS)]
    at: Annotated[float, Field(ge=0.0, le=1e12)]

    @property
    def ends_s(self) -> float:
        """When it ends, in seconds since 1970: at the end of ``until``."""
        day = datetime.combine(date.fromisoformat(self.until), datetime.min.time(), UTC)
        try:
            return (day + timedelta(days=1)).timestamp()
        except OverflowError:
            return day.timestamp()

    @property
    def signed_on(self) -> str:
        """The day on which it was signed, in UTC."""
        return day_of(self.at)

    def __str__(self) -> str:
        """Returns what it allows, in words."""
        allows = [f"{count(self.runs, 'run')} of recipe {self.recipe}"] if self.runs else []
        allows += [count(self.predictions, "predicted row")] if self.predictions else []
        purpose = f", for: {self.purpose}" if self.purpose else ""
        return f"{' and '.join(allows) or 'nothing'} until the end of {self.until} UTC{purpose}"


def new_id() -> str:
    """Draws the id of a grant."""
    return secrets.token_hex(_ID_BYTES)


def day_of(at_s: float) -> str:
    """Returns the day of a time in UTC, as YYYY-MM-DD."""
    return time.strftime("%Y-%m-%d", time.gmtime(at_s))


def sign_grant(grant: Grant, credentials: Credentials) -> Envelope:
    """Signs a grant with the party's key. Raises InputError if the key cannot sign."""
    return Envelope.seal(PAYLOAD, grant.model_dump(mode="json"), credentials)


def read(value: Any, where: str) -> tuple[Envelope, Grant]:
    """Reads a grant and its envelope; checks no signature. Raises InputError that names ``where``,
    or ValueError if it is not an envelope.
    """
    envelope = Envelope.read(value, PAYLOAD)
    fields = envelope.statement
    # A list of JSON is what pydantic takes for a tuple.
    return envelope, parse(Grant, fields, where)
