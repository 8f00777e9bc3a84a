"""Reads a table from SQLite, and from every other database that SQLAlchemy supports. Cells become
text, as in a CSV file, because drivers do not report exact types of columns, and a cell of SQLite
may have any type.
"""

from __future__ import annotations

import contextlib
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.errors import InputError
from vfl_common.passwords import hide_passwords
from vfl_party.data import checks
from vfl_party.data.sources.databases.query import (
    UNSORTED,
    Passes,
    QueryPass,
    clean_message,
    encoding_hint,
    has_order,
    missing_package_error,
    query_of,
)
from vfl_party.data.stream import MarkedError, RowStream, write_cell

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection, CursorResult, Engine

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
