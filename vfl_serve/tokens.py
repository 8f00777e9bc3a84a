"""Tokens of callers: their SHA-256, models and limits; and the check which ports require tokens."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter, ValidationError

from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import write_private
from vfl_common.rpc.channel import split_address

# The prefix lets secret scanners find tokens.
_PREFIX = "vfl_"
_BYTES = 32


class Token(BaseModel):
    """A token of the token file.

    ``models``: names of recipes, or run ids; ``*`` is any. ``rows_a_day``: the maximum number of
    requested rows per day (UTC); None: no limit. ``until``: the last day.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sha256: str
    models: tuple[str, ...] = ("*",)
    rows_a_day: PositiveInt | None = None
    until: date | None = None


@dataclass
class Denied(Exception):  # noqa: N818 - an answer to a caller, not a fault
    """A refused request. ``status``: the HTTP status. ``why``: the text for the caller."""

    status: int
    why: str


_FILE = TypeAdapter(tuple[Token, ...])


class Tokens:
    """The tokens of a file, which is reloaded when it changes. Any thread may use them.

    ``path``: the token file; None: no token is required. ``kept``: the file that keeps the day's
    rows over a restart; None for none. Raises InputError if a file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        kept: Path | None = None,
    ) -> None:
        self._path, self._now, self._lock, self._kept = path, now, threading.Lock(), kept
        self._day = now().date().isoformat()
        # {token name: rows of this day}, and {token name: rows that a restart counts}.
        self._spent = self._read_kept()
        self._reserved = dict(self._spent)
        self._file_state: tuple[int, int] | None = None
        self._known: dict[str, Token] = {}
        if path is not None:
            self._renew()

    def _renew(self) -> None:
        assert self._path is not None  # noqa: S101 - see __init__
        try:
            stats = self._path.stat()
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self._path}: cannot be read ({error.strerror}). Correct serve.tokens.",
            ) from None
        file_state = (stats.st_mtime_ns, stats.st_size)
        if file_state != self._file_state:
            self._known = {token.sha256: token for token in read_tokens(self._path)}
            self._file_state = file_state

    def check(self, secret: str | None, models: Sequence[str]) -> Token | None:
        """Returns the caller's token; None if no token is required. Raises Denied.

        ``models``: the name of the requested model and the ids of its runs.
        """
        if self._path is None:
            return None
        with self._lock:
            # If the file was damaged meanwhile, the tokens that were read before stay valid.
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
        """Counts requested rows; returns the day, or None if the token has no limit.

        Raises Denied above the token's daily limit.
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
        """Writes the rows that count after a restart.

        It writes a hundredth of the limit in advance, so that most requests do not wait for a file.
        """
        if self._kept is None or spent <= self._reserved.get(name, 0):
            return
        kept = self._read_kept()
        names = kept.keys() | self._reserved.keys()
        reserved = {key: max(kept.get(key, 0), self._reserved.get(key, 0)) for key in names}
        reserved[name] = min(max_rows, spent + max_rows // 100)
        try:
            write_private(self._kept, json.dumps({"day": self._day, "rows": reserved}))
        except InputError:
            raise Denied(503, "the rows of the token cannot be counted") from None
        self._reserved = reserved

    def _read_kept(self) -> dict[str, int]:
        """Returns {token name: rows of this day} from the file.

        Raises InputError if the file is damaged.
        """
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
        """Counts rows like ``spend``, and uncounts them if the block is refused with status 503."""
        day = self.spend(token, rows)
        try:
            yield
        except Denied as why:
            if token is not None and day is not None and why.status == 503:
                self._give_back(token, rows, day)
            raise

    def _give_back(self, token: Token, rows: int, day: str) -> None:
        with self._lock:
            # The counts restart on another day.
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
    """Adds a token to a file, which is created if it is missing.

    Returns the token, which is not stored. Raises InputError if the name is taken.
    """
    tokens = read_tokens(path) if path.exists() else ()
    if any(token.name == name for token in tokens):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: already has a token {name!r}. Remove it, or choose another name.",
        )
    secret = _PREFIX + secrets.token_urlsafe(_BYTES)
    _write(path, (*tokens, Token(name=name, sha256=_digest(secret), **facts)))
    return secret


def remove_token(path: Path, name: str) -> None:
    """Removes a token, which becomes invalid. Raises InputError if there is none of this name."""
    tokens = read_tokens(path)
    remaining = tuple(token for token in tokens if token.name != name)
    if len(remaining) == len(tokens):
        names = ", ".join(token.name for token in tokens) or "none"
        raise InputError(
            Code.CONFIG_INVALID, f"{path}: has no token {name!r}. Choose one of: {names}."
        )
    _write(path, remaining)


def _write(path: Path, tokens: Sequence[Token]) -> None:
    lines = [token.model_dump(mode="json", exclude_none=True) for token in tokens]
    write_private(path, json.dumps(lines, indent=1) + "\n")


def _digest(secret: str) -> str:
    # A token has 256 random bits, so a slow hash would not make it harder to guess.
    return hashlib.sha256(secret.encode()).hexdigest()


def check_open(settings: ServeSettings) -> None:
    """Raises InputError if other machines reach a port without a token.

    Also if only one of ``certificate`` and ``key`` is set.
    """
    if (settings.certificate is None) != (settings.key is None):
        raise InputError(
            Code.CONFIG_INVALID, "serve: certificate and key belong together. Set both or neither."
        )
    reached = _reachable_ports(settings)
    if settings.tokens is None and reached:
        key, address = next(iter(reached.items()))
        raise InputError(
            Code.CONFIG_INVALID,
            f"{key}: other machines can reach {address}, and no token is required. Set "
            "serve.tokens to a file that vfl-party token writes, or use 127.0.0.1.",
        )


def describe_plain_tokens(settings: ServeSettings) -> str | None:
    """Returns a warning if tokens cross the network in plain text, otherwise None."""
    reached = _reachable_ports(settings)
    if not reached or settings.certificate is not None:
        return None
    return (
        f"{' and '.join(reached)}: without a certificate, tokens cross the network in plain text. "
        "Set serve.certificate and serve.key, unless a proxy in front of this port uses HTTPS."
    )


def _reachable_ports(settings: ServeSettings) -> dict[str, str]:
    """Returns {key of the party file: address} of the ports that other machines can reach."""
    ports = {"serve.http": settings.http, "serve.grpc": settings.grpc}
    return {
        key: address
        for key, address in ports.items()
        if address is not None and not _is_local(split_address(address)[0])
    }


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def get_allowed_hosts(settings: ServeSettings) -> frozenset[str] | None:
    """Returns the host names that requests may contain; None: any, as a token is required."""
    if settings.tokens is not None:
        return None
    return frozenset(("localhost", "127.0.0.1", "[::1]", split_address(settings.http)[0]))
