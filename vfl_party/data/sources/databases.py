"""Reads the rows of one query from SQLite, and from every other database that SQLAlchemy supports.
Also defines what the readers of all databases need: the query, error texts, and the comparison of
passes.

Cells become text, as in a CSV file, because drivers do not report exact types of columns, and a
cell of SQLite may have any type.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.text import clean, hide_passwords, hide_passwords_of
from vfl_party.data import checks
from vfl_party.data.stream import MarkedError, RowStream, write_cell

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, CursorResult, Engine


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


_BLOCK_ROWS = 4096
# For each dialect, the statement that begins a read-only transaction with a snapshot of the tables.
_BEGIN = {
    # The file is opened only for reading, so no further option is needed.
    "sqlite": "BEGIN",
    "mysql": "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    "mariadb": "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY",
    "oracle": "SET TRANSACTION READ ONLY",
    "postgresql": "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
}


def open_alchemy(settings: DataSettings) -> RowStream:
    """Opens the rows of a query. Raises InputError if the database refuses the query."""
    try:
        import sqlalchemy
    except ImportError:
        raise missing_package_error(settings.source, "sqlalchemy") from None
    source, query = hide_passwords(settings.source), query_of(settings)
    engine = engine_of(settings.source)
    connection = connect(engine, settings.source)
    reading = _Reading(settings, query, connection, Passes(settings))
    weakref.finalize(reading, _close, connection, engine)
    begin = _BEGIN.get(engine.dialect.name)
    if begin is not None:
        # An older server may not support this. The passes are compared anyway.
        with contextlib.suppress(sqlalchemy.exc.DBAPIError):
            connection.exec_driver_sql(begin)
    reading.first = reading.execute()
    reading.names = tuple(reading.first.keys())
    if not all(name.strip() for name in reading.names):
        place = next(place for place, name in enumerate(reading.names, 1) if not name.strip())
        raise checks.unusable(source, f"column {place} of data.query has no name. Name it with AS.")
    unsorted = "" if has_order(query) else UNSORTED
    return RowStream(source, reading.names, True, reading.blocks, ordered=False, unsorted=unsorted)


def connect(engine: Engine, source: str) -> Connection:
    """Opens a connection. Raises InputError."""
    from sqlalchemy.exc import DBAPIError

    try:
        return engine.connect()
    except DBAPIError as error:
        reason = clean_message(str(error.orig), source, quoted=False)
        raise checks.unreadable(
            hide_passwords(source),
            f"cannot be opened ({reason}). Correct data.source, or start the server."
            f"{encoding_hint(source)}",
        ) from None


@dataclass(eq=False)
class _Reading:
    """A query on a connection, which is open as long as this object lives.

    ``first``: The result of the query from which the column names were read. The first pass uses
    it.
    """

    settings: DataSettings
    query: str
    connection: Connection
    passes: Passes
    names: tuple[str, ...] = ()
    first: CursorResult[Any] | None = None

    def execute(self) -> CursorResult[Any]:
        """Runs the query unchanged, so that its order is kept and every dialect works.

        Raises InputError.
        """
        from sqlalchemy.exc import DBAPIError, ResourceClosedError

        options = {"stream_results": True, "yield_per": _BLOCK_ROWS, "no_parameters": True}
        try:
            result = self.connection.execution_options(**options).exec_driver_sql(self.query)
            result.keys()
        except DBAPIError as error:
            raise query_error(self.settings.source, error, None) from None
        except ResourceClosedError:
            raise checks.unusable(
                hide_passwords(self.settings.source), "data.query gives no rows. Write one SELECT."
            ) from None
        return result

    def blocks(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields blocks of rows with the wanted columns. Raises InputError."""
        source, ids = (
            hide_passwords(self.settings.source),
            [name for name in self.settings.id if name in self.names],
        )
        checks.require_names(source, "columns", wanted, self.names)
        schema = pa.schema([(name, pa.string()) for name in wanted])
        query_pass = QueryPass(len(ids))
        result = self.execute() if self.first is None else self.first
        self.first = None
        with contextlib.closing(result):
            while rows := self._fetch(result, query_pass.rows)[
                : _count_rows_left(self.settings, query_pass)
            ]:
                texts = {
                    name: pa.array(
                        texts_of(source, name, self.names.index(name), rows, query_pass.rows),
                        pa.string(),
                    )
                    for name in dict.fromkeys([*wanted, *ids])
                }
                query_pass.add(len(rows), [texts[name] for name in ids])
                self.passes.compare_full(query_pass)
                yield pa.RecordBatch.from_arrays([texts[name] for name in wanted], schema=schema)
        self.passes.compare(query_pass)

    def _fetch(self, result: CursorResult[Any], before: int) -> Sequence[Any]:
        from sqlalchemy.exc import DBAPIError, SQLAlchemyError

        try:
            return result.fetchmany(_BLOCK_ROWS)
        except DBAPIError as error:
            raise query_error(self.settings.source, error, before) from None
        except (SQLAlchemyError, sqlite3.Error):
            raise checks.unreadable(
                hide_passwords(self.settings.source),
                f"the connection was lost after {before:,} rows. Start again.",
            ) from None


def _count_rows_left(settings: DataSettings, seen: QueryPass) -> int | None:
    """Returns the number of rows that are still wanted; None for all rows."""
    return None if settings.first is None else settings.first - seen.rows


def texts_of(
    source: str, name: str, place: int, rows: Sequence[Any], before: int = 0
) -> list[str | None]:
    """Converts the cells of a column to text. Raises InputError for unsupported values.

    ``place``: The position of the column in each row. ``before``: The number of rows before
    ``rows``.
    """
    texts = []
    for number, row in enumerate(rows, before + 1):
        try:
            texts.append(write_cell(row[place]))
        except MarkedError as error:
            raise checks.unusable(
                source, f"column {name!r}: the text in row {number} {error}"
            ) from None
        except TypeError as error:
            raise checks.unusable(
                source,
                f"column {name!r} must hold numbers, text or dates (got {error} in row {number}). "
                "Cast it in data.query, or leave it out.",
            ) from None
    return texts


def engine_of(source: str) -> Engine:
    """Creates the engine for a URL. Raises InputError for an invalid URL, an unknown database, or a
    missing driver or file.
    """
    from sqlalchemy import create_engine, make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError
    from sqlalchemy.pool import NullPool

    try:
        url = make_url(source)
        if url.drivername in ("sqlite", "sqlite+pysqlite"):
            path = _find_sqlite_file(source, url)
            # The file is opened with mode=ro. Otherwise SQLAlchemy would create a missing file, and
            # a query could write.
            return create_engine(
                "sqlite://", poolclass=NullPool, creator=lambda: _connect_sqlite(path)
            )
        return create_engine(url, poolclass=NullPool)
    except NoSuchModuleError:
        name = source.partition(":")[0]
        raise checks.unreadable(
            hide_passwords(source),
            f"SQLAlchemy has no database {name!r}. Correct data.source, or install the package "
            "for it.",
        ) from None
    except (ArgumentError, ValueError):
        raise checks.unreadable(
            hide_passwords(source),
            "is not a URL of SQLAlchemy. Write DIALECT+DRIVER://USER@HOST/NAME, or sqlite:///PATH."
            f"{encoding_hint(source)}",
        ) from None
    except ImportError as error:
        raise missing_package_error(source, error.name or "the database's driver") from None


def _find_sqlite_file(source: str, url: URL) -> Path:
    """Returns the file of an SQLite database. Raises InputError if it does not exist."""
    if not url.database or url.database == ":memory:" or url.query:
        raise checks.unreadable(
            source,
            "does not name an SQLite file. Write sqlite:///PATH, and nothing after the path.",
        )
    path = Path(url.database).absolute()
    if not path.is_file():
        raise checks.unreadable(
            source, "no such file. Correct data.source, or mount the volume that holds it."
        )
    return path


def _connect_sqlite(path: Path) -> sqlite3.Connection:
    # With isolation_level=None, only BEGIN begins a transaction. The thread check is off, because
    # another thread may close the stream.
    return sqlite3.connect(
        f"{path.as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )


def query_error(source: str, error: Any, rows: int | None) -> InputError:
    """Returns the error for a query that failed after ``rows`` rows, or before its first row if
    ``rows`` is None. The error shows no values.
    """
    text = str(error.orig)
    if "decode" in text:
        return checks.unusable(
            hide_passwords(source),
            "holds text that is not UTF-8. Correct it, or cast the column in data.query, for "
            "example as BLOB and then to text.",
        )
    if "not a database" in text or "malformed" in text:
        return checks.unreadable(
            hide_passwords(source), "is not a readable SQLite file. Correct data.source."
        )
    if "is locked" in text:
        return checks.unreadable(
            hide_passwords(source),
            "is locked by another program, which writes to it. Start again when it has ended.",
        )
    names = type(error).__name__
    reason = clean_message(
        text, source, quoted=rows is None and names in ("ProgrammingError", "OperationalError")
    )
    if rows is None:
        return checks.unusable(
            hide_passwords(source),
            f"the database refuses data.query ({reason}). Correct data.query.",
        )
    return checks.unreadable(
        hide_passwords(source), f"data.query failed after {rows:,} rows ({reason}). Start again."
    )


def _close(connection: Connection, engine: Engine) -> None:
    from sqlalchemy.exc import SQLAlchemyError

    with contextlib.suppress(SQLAlchemyError, sqlite3.Error):
        connection.close()
    engine.dispose()
