"""Defines what the readers of all databases need: the query, error texts, and the comparison of
passes.
"""

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
from vfl_common.text import clean, hide_passwords, hide_passwords_of
from vfl_party.data import checks

T = TypeVar("T")

_TICK_S = 0.2
_READS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/|\()*+(?:select|with|values|table|from)\b",
    re.IGNORECASE | re.DOTALL,
)
# Patterns to find an ORDER BY at the end of a query: texts, names and comments are removed first,
# then parentheses.
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
# The quoted part of a message, which may be a value: from the first quote that is not an apostrophe
# to the last quote, or to the end.
_QUOTED = re.compile("(?<!\\w)[\"'`»«„](?:.*[\"'`»«“]|.*)")
# The user and the password in a URL, up to the last @.
_USER = re.compile(r"[^:]+://([^?]*)@", re.DOTALL)
# The first day of the year 1 and the last day of the year 9999, in days since 1970-01-01.
_FIRST, _LAST = -719_162, 2_932_896
# The maximum number of characters of a server's message.
_LONGEST = 300


def query_of(settings: DataSettings) -> str:
    """Returns ``data.query`` without a final semicolon. Raises InputError if it is missing or does
    not begin like a SELECT.
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
    """Returns whether the settings select rows by their position."""
    return settings.first is not None or settings.duplicates == "first"


def has_order(query: str) -> bool:
    """Returns whether a query ends with an ORDER BY outside parentheses.

    This is not a full parser. The result is used for a note, and to decide whether to sort the
    rows.
    """
    remainder, n = _TEXTS.sub(" ", query), 1
    while n:
        remainder, n = _INNER.subn(" ", remainder)
    return _ORDER.search(remainder) is not None


def missing_package_error(source: str, package: str) -> InputError:
    """Returns the error for a package that a database needs and that is not installed."""
    return InputError(
        Code.CONFIG_INVALID,
        f"{hide_passwords(source)}: needs {package}, which is not installed. Run pip install "
        f"{package}.",
    )


def encoding_hint(source: str) -> str:
    """Returns a sentence about characters of a password that have a meaning in a URL; '' if there
    seem to be none.
    """
    user = _USER.match(source)
    if user is None or not set(user[1]) & set("@#/"):
        return ""
    return " If its password has @, # or /, write %40, %23 or %2F for it in data.source."


def clean_message(text: str, source: str, *, quoted: bool) -> str:
    """Returns the first line of a server's message without passwords. ``quoted``: Whether to keep
    quoted parts, which may be values.
    """
    line = text.strip().partition("\n")[0]
    line = hide_passwords_of(line, source)
    return clean(line if quoted else _QUOTED.sub("…", line), _LONGEST)


def wait_for(call: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Runs ``call`` in a thread and returns its result. After SIGINT or SIGTERM, cancels the query,
    and raises KeyboardInterrupt or Stopped once the query has ended.
    """
    has_begun, has_stopped, has_ended = (threading.Event() for _ in range(3))
    results: list[T] = []
    errors: list[BaseException] = []

    def run_call() -> None:
        has_begun.set()
        # A signal may come before the thread runs.
        if not has_stopped.is_set():
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
                errors.append(error)
        has_ended.set()

    try:
        threading.Thread(target=run_call, name="query", daemon=True).start()
        # A signal does not always end a wait without a timeout.
        while not has_ended.wait(_TICK_S):
            pass
    except BaseException:
        has_stopped.set()
        # Cancelling a query that has just begun has no effect, so this repeats.
        while has_begun.is_set() and not has_ended.wait(_TICK_S):
            with contextlib.suppress(Exception):
                cancel()
        raise
    if errors:
        # The error refers to this frame, so the frame must not refer to the error.
        raise errors.pop()
    return results.pop()


def require_dates(source: str, name: str, column: pa.Array) -> None:
    """Raises InputError for infinite dates and dates outside the years 1 to 9999."""
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
    """Compares complete passes over the rows of a query: the number of rows, and their ids in
    order.

    Passes may differ, because not every database supports a snapshot for several queries, and rows
    have no fixed order without ORDER BY.
    """

    def __init__(self, settings: DataSettings) -> None:
        self._source, self._limit = hide_passwords(settings.source), settings.first
        self._first: tuple[int, bytes] | None = None

    def compare_full(self, pass_: QueryPass) -> None:
        """Compares a pass that has reached the limit of rows, after which no more rows are read.
        Raises InputError if it differs from the first pass.
        """
        if pass_.rows == self._limit:
            self.compare(pass_)

    def compare(self, pass_: QueryPass) -> None:
        """Compares a pass that has reached its end. Raises InputError if it differs from the first
        pass.
        """
        summary = pass_.rows, b"".join(column.digest() for column in pass_.digests)
        if self._first is None:
            self._first = summary
        if summary != self._first:
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
    """The summary of one pass: the number of rows, and digests of the id columns."""

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
            # All cells are joined to one text, without a Python object for each cell.
            cell_list = pa.ListArray.from_arrays(pa.array([0, n], pa.int32()), texts)
            digest.update(pc.binary_join(cell_list, "\x1e")[0].as_buffer())
            digest.update(b"\x1e")
