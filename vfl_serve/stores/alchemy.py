"""Queries SQLite and other databases of SQLAlchemy for rows by id. Ids are arguments, never part of
the query.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.errors import InputError
from vfl_common.text import hide_passwords
from vfl_party.data import checks
from vfl_party.data.choice import choose
from vfl_party.data.sources.databases import (
    connect,
    engine_of,
    missing_package_error,
    query_error,
    query_of,
    texts_of,
)
from vfl_serve.stores.seam import BrokenError, ConnectionPool, IdBatch, ValueMismatchError

if TYPE_CHECKING:
    from sqlalchemy import Connection


# Does not match a PostgreSQL cast such as x::ids.
_IDS = re.compile(r"(?<![:\w\\]):ids\b")


# Maximum rows per id (for data.duplicates = "first"), plus a constant for queries of few ids.
_ROWS_OF_ONE, _MORE_ROWS = 16, 1024


def with_ids(query: str, mark: str, source: str) -> str:
    """Returns a query with ``mark`` in place of ``:ids``. Raises InputError if it has none."""
    if not _IDS.search(query):
        raise checks.unusable(
            hide_passwords(source),
            "data.query has no :ids. Add a condition, for example WHERE id IN :ids, or in "
            "PostgreSQL WHERE id = ANY(:ids).",
        )
    return _IDS.sub(lambda _: mark, query)


def row_limit(ids: int) -> int:
    """Returns the maximum number of rows that a query may return for so many ids."""
    return _ROWS_OF_ONE * ids + _MORE_ROWS


def too_many(source: str, ids: int, max_rows: int) -> InputError:
    """Returns the error for a query that returns more than ``max_rows`` rows."""
    number = "one id" if ids == 1 else f"{ids:,} ids"
    return checks.unusable(
        source,
        f"data.query returns more than {max_rows:,} rows for {number}. Correct its :ids condition.",
    )


@contextlib.contextmanager
def name_keys() -> Iterator[None]:
    """Replaces keys of ``data`` with those of ``serve.store`` in error messages."""
    try:
        yield
    except InputError as error:
        text = str(error).replace("data.query", "serve.store.query")
        raise error.privately(text.replace("data.source", "serve.store.source")) from None


class AlchemyRows:
    """Rows of a database through SQLAlchemy; see ``seam.Source``."""

    def __init__(self, settings: DataSettings, connections: int) -> None:
        self.settings = settings
        try:
            import sqlalchemy
        except ImportError:
            raise missing_package_error(settings.source, "sqlalchemy") from None
        with name_keys():
            query = with_ids(query_of(settings), ":ids", settings.source)
            self._engine = engine_of(settings.source)
        text = sqlalchemy.text(query)
        self._query = text.bindparams(sqlalchemy.bindparam("ids", expanding=True))
        self._pool: ConnectionPool[Connection] = ConnectionPool(
            self._open, lambda connection: connection.close(), connections, _interrupt
        )

    def check(self) -> None:
        """Runs the query without ids. Raises InputError."""
        with name_keys():
            connection = self._open()
            try:
                self._fetch(connection, [])
            finally:
                connection.close()

    def rows(self, ids: Sequence[str], until_s: float) -> IdBatch:
        """See ``seam.Source``."""
        with name_keys():
            return IdBatch(
                self._pool.run(lambda connection: self._fetch(connection, ids), until_s), True
            )

    def close(self) -> None:
        """Closes the connections."""
        self._pool.close()

    def _open(self) -> Connection:
        return connect(self._engine, self.settings.source)

    def _fetch(self, connection: Connection, ids: Sequence[str]) -> pa.Table:
        from sqlalchemy.exc import DBAPIError, ResourceClosedError

        source, max_rows = hide_passwords(self.settings.source), row_limit(len(ids))
        try:
            with connection.execute(self._query, {"ids": list(ids)}) as result:
                names = list(result.keys())
                rows = result.fetchmany(max_rows + 1)
            # This ends the transaction, so that the next query sees new rows.
            connection.rollback()
        except DBAPIError as error:
            raise self._to_error(error) from None
        except ResourceClosedError:
            raise checks.unusable(source, "data.query returns no rows. Write one SELECT.") from None
        if len(rows) > max_rows:
            raise too_many(source, len(ids), max_rows)
        chosen = choose(source, names, self.settings, False)
        used_columns = list(dict.fromkeys([*chosen.id, *chosen.features]))
        cells = {name: texts_of(source, name, names.index(name), rows) for name in used_columns}
        return pa.table({name: pa.array(texts, pa.string()) for name, texts in cells.items()})

    def _to_error(self, error: Any) -> Exception:
        from sqlalchemy.exc import DataError

        if "interrupted" in str(error.orig):
            return TimeoutError()
        refusal = query_error(self.settings.source, error, None)
        if isinstance(error, DataError):
            return ValueMismatchError(refusal.code, str(refusal))
        return BrokenError(refusal.code, str(refusal)) if error.connection_invalidated else refusal


def _interrupt(connection: Connection) -> None:
    """Interrupts a query of SQLite. Other drivers have no common way to do this."""
    driver = connection.connection.driver_connection
    with contextlib.suppress(sqlite3.Error):
        if isinstance(driver, sqlite3.Connection):
            driver.interrupt()
