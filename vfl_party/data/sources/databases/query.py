"""The base of tables of all databases: the query, texts of errors, and the comparison of passes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords, hide_passwords_of
from vfl_common.text import clean
from vfl_party.data import checks

T = TypeVar("T")

_TICK_S = 0.2
_READS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*+(?:select|with|values|table|from)\b",
    re.IGNORECASE | re.DOTALL,
)
# Texts, names and comments; what stands in parentheses; an order of what is left.
_TEXTS = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|--[^\n]*|/\*.*?\*/|\$(\w*)\$.*?\$\1\$", re.DOTALL)
_INNER = re.compile(r"\([^()]*\)")
_ORDER = re.compile(r"\border\s+by\b", re.IGNORECASE)
# Notes for settings that take the first rows of a query without an order.
SORTED = (
    "the query has no ORDER BY at its end, so the first rows are those in the order of the id "
    "columns, then of the other columns. To choose the order, end the query with ORDER BY."
)
UNSORTED = (
    "the query has no ORDER BY at its end, so the database chooses which rows are the first, and "
    "may choose others next time. End the query with ORDER BY."
)
# A value may hold quotes and ends of lines: from the first quote that is not an apostrophe to the
# last one, or to the end.
_QUOTED = re.compile("(?<!\\w)[\"'`»«„](?:.*[\"'`»«“]|.*)")
# User and password, up to the last @.
_USER = re.compile(r"[^:]+://([^?]*)@", re.DOTALL)
# First day of the year 1 and last day of 9999, from 1970-01-01.
_FIRST, _LAST = -719_162, 2_932_896
# Maximum characters of a server's message.
_LONGEST = 300


def query_of(settings: DataSettings) -> str:
    """Returns ``data.query`` without a final semicolon. Raises InputError if it is missing or
    writes.
    """
    source, query = (
        hide_passwords(settings.source),
        (settings.query or "").rstrip().removesuffix(";").rstrip(),
    )
    if not query:
        raise checks.unusable(source, "needs data.query. Give a SELECT whose rows are the table.")
    if not _READS.match(query):
        raise checks.unusable(source, "data.query must only read. Write one SELECT.")
    return query


def takes_first(settings: DataSettings) -> bool:
    """Returns whether settings take some rows by their position."""
    return settings.first is not None or settings.duplicates == "first"


def has_order(query: str) -> bool:
    """Returns whether a query ends with an ORDER BY outside parentheses.

    It does not parse a dialect: it serves for a note, and to sort unsorted rows.
    """
    left, n = _TEXTS.sub(" ", query), 1
    while n:
        left, n = _INNER.subn(" ", left)
    return _ORDER.search(left) is not None


def missing_package_error(source: str, package: str) -> InputError:
    """Returns the error for a package that a database needs and that is not installed."""
    return InputError(
        Code.CONFIG_INVALID,
        f"{hide_passwords(source)}: needs {package}, which is not installed. Run pip install "
        f"{package}.",
    )


def encoding_hint(source: str) -> str:
    """Returns advice, as a further sentence, about characters of a password that have a meaning in
    a URL; '' if there seem to be none.
    """
    user = _USER.match(source)
    if user is None or not set(user[1]) & set("@#/"):
        return ""
    return " If its password has @, # or /, write %40, %23 or %2F for it in data.source."


def words(text: str, source: str, *, quoted: bool) -> str:
    """Returns the first line of a server's message without passwords; unless ``quoted``, without
    what it quotes, which may be a value.
    """
    line = text.strip().partition("\n")[0]
    line = hide_passwords_of(line, source)
    return clean(line if quoted else _QUOTED.sub("…", line), _LONGEST)


def wait_for(call: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Has a thread wait for a database. After SIGINT or SIGTERM it cancels the query, and raises
    KeyboardInterrupt or Stopped once the query has ended.
    """
    begun, stopped, ended = (threading.Event() for _ in range(3))
    results: list[T] = []
    failed: list[BaseException] = []

    def ask() -> None:
        begun.set()
        # A signal may come before the thread runs.
        if not stopped.is_set():
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
                failed.append(error)
        ended.set()

    try:
        threading.Thread(target=ask, name="query", daemon=True).start()
        # The signal alone does not always end a wait.
        while not ended.wait(_TICK_S):
            pass
    except BaseException:
        stopped.set()
        # Cancelling a query that has just begun has no effect, so this repeats.
        while begun.is_set() and not ended.wait(_TICK_S):
            with contextlib.suppress(Exception):
                cancel()
        raise
    if failed:
        # An error keeps this frame, which must not keep the error.
        raise failed.pop()
    return results.pop()


def require_dates(source: str, name: str, column: pa.Array) -> None:
    """Raises InputError for a database's infinite dates, and others outside the years 1 to 9999."""
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        day = 1 if pa.types.is_date32(kind) else 86_400_000_000
        ends = pc.min_max(column.view(pa.int32() if day == 1 else pa.int64())).as_py()
        if ends["min"] is not None and (
            ends["min"] < _FIRST * day or ends["max"] >= (_LAST + 1) * day
        ):
            raise checks.unusable(
                source,
                f"column {name!r} holds a date before the year 1 or after 9999, such as infinity. "
                "Replace it in the query, for example with nullif.",
            )


class Passes:
    """Compares the complete passes over a query's rows by their number and ids, in order.

    Not every database can hold a snapshot of its tables for several queries, and none has an order
    without ORDER BY.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._source, self._limit = hide_passwords(settings.source), settings.first
        self._first: tuple[int, bytes] | None = None

    def compare_full(self, pass_: QueryPass) -> None:
        """Compares a pass that has the first rows that are wanted, after which no more are read.
        Raises InputError.
        """
        if pass_.rows == self._limit:
            self.compare(pass_)

    def compare(self, pass_: QueryPass) -> None:
        """Compares a pass that has reached its end. Raises InputError if it differs from the first
        one.
        """
        seen = pass_.rows, b"".join(column.digest() for column in pass_.digests)
        if self._first is None:
            self._first = seen
        if seen != self._first:
            before, now = self._first[0], pass_.rows
            raise checks.unreadable(
                self._source,
                f"the query gave {before:,} rows and then {now:,}. Add ORDER BY with the id "
                "columns, and read while nobody writes to the tables."
                if before != now
                else "the query gave other rows when it was read again, or another order. Add "
                "ORDER BY with the id columns, and read while nobody writes to the tables.",
            )


class QueryPass:
    """The summary of one pass: number of rows, and digests of the id columns."""

    def __init__(self, ids: int) -> None:
        self.rows = 0
        self.digests = [blake2b(digest_size=16) for _ in range(ids)]

    def add(self, n: int, ids: Iterable[pa.Array]) -> None:
        """Adds the next ``n`` rows, with the values of each id column."""
        self.rows += n
        for digest, values in zip(self.digests, ids, strict=True):
            if pa.types.is_integer(values.type):
                numbers = pc.cast(values, pa.int64(), safe=False)
                digest.update(pc.fill_null(numbers, -(1 << 63)).to_numpy())
                continue
            texts = pc.fill_null(pc.cast(values, pa.string()), "\x1d")
            # All cells as one text, without an object of Python for each.
            whole = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), texts)
            digest.update(pc.binary_join(whole, "\x1e")[0].as_buffer())
            digest.update(b"\x1e")
