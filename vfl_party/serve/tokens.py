"""Tokens of callers: their SHA-256, the models they allow and their limits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from vfl_common.errors import Code, InputError
from vfl_common.files import write_private

# The prefix lets secret scanners find tokens.
_PREFIX = "vfl_"
_BYTES = 32


class Token(BaseModel):
    """A token, as the file has it.

    ``models``: names of recipes, or run ids; ``*`` is any. ``rows_a_day``: the most rows that are
    asked for in a day (UTC); None: no limit. ``until``: the last day.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str
    models: tuple[str, ...] = ("*",)
    rows_a_day: PositiveInt | None = None
    until: date | None = None


@dataclass
class Denied(Exception):  # noqa: N818 - an answer to a caller, not a fault
    """Why a caller gets no answer. ``status``: of HTTP."""

    status: int
    why: str


_FILE = TypeAdapter(tuple[Token, ...])


class Tokens:
    """The tokens of a file, read again when it changes; any thread may ask.

    ``path``: None: everybody may ask. ``kept``: where rows of the day are counted beyond a restart;
    None: nowhere. Raises InputError if a file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        kept: Path | None = None,
    ) -> None:
        self._path, self._now, self._lock, self._kept = path, now, threading.Lock(), kept
        self._day = now().date().isoformat()
        # {token's name: rows of this day}; and how many a restart counts as asked for.
        self._spent = self._read_kept()
        self._reserved = dict(self._spent)
        self._read_as: tuple[int, int] | None = None
        self._known: dict[str, Token] = {}
        if path is not None:
            self._renew()

    def _renew(self) -> None:
        assert self._path is not None  # noqa: S101 - see __init__
        try:
            about = self._path.stat()
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self._path}: cannot be read ({error.strerror}). Correct serve.tokens.",
            ) from None
        read_as = (about.st_mtime_ns, about.st_size)
        if read_as != self._read_as:
            self._known = {token.sha256: token for token in read_tokens(self._path)}
            self._read_as = read_as

    def check(self, secret: str | None, models: Sequence[str]) -> Token | None:
        """Returns the token of a caller; None if everybody may ask. Raises Denied.

        ``models``: the names of the model that is asked.
        """
        if self._path is None:
            return None
        with self._lock:
            # A file that was damaged while this serves allows nobody new, and nobody less.
            with contextlib.suppress(InputError):
                self._renew()
            token = self._known.get(_digest(secret)) if secret else None
        if token is None:
            raise Denied(401, "a token is required. Send Authorization: Bearer TOKEN.")
        if token.until is not None and self._now().date() > token.until:
            raise Denied(401, "the token has expired")
        if not {"*", *models} & set(token.models):
            raise Denied(403, "the token is for other models")
        return token

    def spend(self, token: Token | None, rows: int) -> str | None:
        """Counts rows that a caller asks for; returns the day. None: they are not counted. Raises
        Denied if these are too many for a day.
        """
        if token is None or token.rows_a_day is None:
            return None
        with self._lock:
            day = self._now().date().isoformat()
            if day != self._day:
                self._day, self._spent, self._reserved = day, {}, {}
            spent = self._spent.get(token.name, 0) + rows
            if spent > token.rows_a_day:
                raise Denied(429, f"the token is for {token.rows_a_day} rows a day")
            self._reserve(token.name, spent, token.rows_a_day)
            self._spent[token.name] = spent
            return day

    def _reserve(self, name: str, spent: int, max_rows: int) -> None:
        """Writes that a restart counts so many rows as asked for. It writes a hundredth of the
        limit ahead, so that not every request waits for a file.
        """
        if self._kept is None or spent <= self._reserved.get(name, 0):
            return
        others = self._read_kept()
        names = others.keys() | self._reserved.keys()
        reserved = {key: max(others.get(key, 0), self._reserved.get(key, 0)) for key in names}
        reserved[name] = min(max_rows, spent + max_rows // 100)
        try:
            write_private(self._kept, json.dumps({"day": self._day, "rows": reserved}))
        except InputError:
            raise Denied(503, "the rows of the token cannot be counted") from None
        self._reserved = reserved

    def _read_kept(self) -> dict[str, int]:
        """Returns the rows of this day that are kept. Raises InputError if the file is damaged."""
        if self._kept is None or not self._kept.exists():
            return {}
        try:
            fields = json.loads(self._kept.read_text(encoding="utf-8"))
            rows = {str(name): int(count) for name, count in fields["rows"].items()}
            return rows if fields["day"] == self._day else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                Code.FILE_INVALID,
                f"{self._kept}: is not a readable count of the tokens' rows. Restore it, or remove "
                "it to restart the count of this day.",
            ) from None

    @contextlib.contextmanager
    def spending(self, token: Token | None, rows: int) -> Iterator[None]:
        """Counts the rows of the block as ``spend`` does, and gives them back if nobody was asked
        for them: too many requests wait.
        """
        day = self.spend(token, rows)
        try:
            yield
        except Denied as why:
            if token is not None and day is not None and why.status == 503:
                self._give_back(token, rows, day)
            raise

    def _give_back(self, token: Token, rows: int, day: str) -> None:
        with self._lock:
            # Another day has none of them.
            if day == self._day:
                self._spent[token.name] -= rows


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Reads a file of tokens. Raises InputError."""
    try:
        return _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Create it with vfl-party token.",
        ) from None
    except ValidationError:
        raise InputError(
            Code.FILE_INVALID, f"{path}: is not a token file. Write it with vfl-party token."
        ) from None


def add_token(path: Path, name: str, **facts: Any) -> str:
    """Adds a token to a file, which is made if it is missing; returns the token, which is kept
    nowhere. Raises InputError if the file has one of this name.
    """
    known = read_tokens(path) if path.exists() else ()
    if any(token.name == name for token in known):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: already has a token {name!r}. Remove it, or choose another name.",
        )
    secret = _PREFIX + secrets.token_urlsafe(_BYTES)
    _write(path, (*known, Token(name=name, sha256=_digest(secret), **facts)))
    return secret


def remove_token(path: Path, name: str) -> None:
    """Removes a token: from then on it opens nothing. Raises InputError if there is none of this
    name.
    """
    known = read_tokens(path)
    rest = tuple(token for token in known if token.name != name)
    if len(rest) == len(known):
        names = ", ".join(token.name for token in known) or "none"
        raise InputError(
            Code.CONFIG_INVALID, f"{path}: has no token {name!r}. Choose one of: {names}."
        )
    _write(path, rest)


def _write(path: Path, tokens: Sequence[Token]) -> None:
    lines = [token.model_dump(mode="json", exclude_none=True) for token in tokens]
    write_private(path, json.dumps(lines, indent=1) + "\n")


def _digest(secret: str) -> str:
    # A token has 256 random bits: nobody guesses one, and a slow hash would only slow its owner.
    return hashlib.sha256(secret.encode()).hexdigest()
