"""The contents of a grant, which a party signs with its key."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from vfl_common.config.base import Section, match_pattern, parse
from vfl_common.config.policy import Pin
from vfl_common.config.recipe_tables import Name
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import Envelope
from vfl_common.text import clean, count

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
