"""Reads a table from PostgreSQL through ADBC. The columns have the types of the query's result."""

from __future__ import annotations

import contextlib
import os
import re
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.errors import InputError, InternalError
from vfl_common.text import hide_passwords
from vfl_party.data import checks
from vfl_party.data.sources.databases import (
    SORTED,
    Passes,
    QueryPass,
    clean_message,
    encoding_hint,
    has_order,
    missing_package_error,
    query_of,
    require_dates,
    takes_first,
    wait_for,
)
from vfl_party.data.stream import RowStream

T = TypeVar("T")

# The connection timeout in seconds, unless the URL or PGCONNECT_TIMEOUT sets it.
_CONNECT_S = 20
_BEGIN = (
    # All passes see the same snapshot of the tables.
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY",
    # With these two settings, rows without ORDER BY always have the same order.
    "SET LOCAL synchronize_seqscans = off",
    "SET LOCAL max_parallel_workers_per_gather = 0",
)
_CASTS = {
    "numeric": "float8",
    "money": "numeric::float8",
    "oid": "int8",
    "uuid": "text",
    "bpchar": "text",
}
# As text, an id keeps all its digits.
_ID_CASTS = _CASTS | {"numeric": "text"}
# Each entry has a pattern of the message of server or client, the problem, and the fix.
_REFUSALS = (
    (
        r"password authentication failed|no password supplied",
        "refuses the user or the password",
        "Set PGPASSWORD or ~/.pgpass, or correct the user in data.source.",
    ),
    (
        r'database ".*" does not exist',
        "has no such database",
        "Correct the name after the last slash of data.source.",
    ),
    (r'role ".*" does not exist', "does not know this user", "Correct data.source."),
    (
        r"no pg_hba.conf entry|peer authentication failed",
        "does not let this user in from this machine",
        "Ask its administrator.",
    ),
    (r"too many clients|remaining connection slots", "has no connection left", "Try again later."),
    (
        r"SSL|certificate",
        "cannot be trusted, or does not support TLS",
        "Correct sslmode and sslrootcert in data.source.",
    ),
    (
        r"connection refused|no such file|timeout expired|could not translate|no route|unreachable|timed out",  # noqa: E501
        "cannot be reached",
        "Correct host and port in data.source, or start the server.",
    ),
)
_TIMEOUT = re.compile(r"canceling statement due to .*timeout")
_LOST = re.compile(
    r"server closed the connection|terminating connection|could not receive|SSL .*EOF|reset by peer"
)
_WRITES = re.compile(r"cannot execute .* in a read-only transaction")
_SEVERITY, _CLIENT = (
    re.compile(r"\b(?:ERROR|FATAL|PANIC):\s+"),
    re.compile(r".*failed: |.*\[libpq\] "),
)


def open_postgres(settings: DataSettings) -> RowStream:
    """Opens the rows of a query. Raises InputError if the server refuses the connection or the
    query.
    """
    try:
        import adbc_driver_manager
        from adbc_driver_postgresql import dbapi
    except ImportError:
        raise missing_package_error(settings.source, "adbc-driver-postgresql") from None
    source, query = hide_passwords(settings.source), query_of(settings)
    connection = None
    try:
        connection = dbapi.connect(with_timeout(settings.source))
        with connection.cursor() as cursor:
            for statement in _BEGIN:
                cursor.execute(statement)
            schema = _wait_for(cursor, lambda: cursor.adbc_execute_schema(_wrap_query("*", query)))
    except KeyboardInterrupt:
        if connection is not None:
            connection.close()
        raise
    except adbc_driver_manager.Error as error:
        if connection is not None:
            connection.close()
            raise query_error(settings.source, error) from None
        raise connection_error(settings.source, str(error)) from None
    unsorted = "" if has_order(query) else SORTED
    sorts = bool(unsorted) and takes_first(settings)
    reading = _Reading(settings, query, schema, connection, Passes(settings), sorts)
    weakref.finalize(reading, _close, connection)
    names = tuple(schema.names)
    return RowStream(source, names, False, reading.blocks, ordered=False, unsorted=unsorted)


@dataclass(eq=False)
class _Reading:
    """A query in a transaction, which lasts as long as this object lives.

    ``sorts``: Whether to sort the rows by the id columns, then by the other columns. ``turn``: The
    number of the current pass.
    """

    settings: DataSettings
    query: str
    schema: pa.Schema
    connection: Any
    passes: Passes
    sorts: bool = False
    turn: int = 0

    def blocks(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields blocks of rows with the wanted columns. Raises InputError."""
        source = hide_passwords(self.settings.source)
        checks.require_names(source, "columns", wanted, self.schema.names)
        ids = [name for name in self.settings.id if name in self.schema.names]
        fetched_names = list(dict.fromkeys([*ids, *wanted]))
        self.turn = turn = self.turn + 1
        query_pass = QueryPass(len(ids))
        with contextlib.closing(self._iterate_batches(self._make_select(fetched_names))) as batches:
            for batch in batches:
                columns = dict(zip(fetched_names, batch.columns, strict=True))
                for name in wanted:
                    require_dates(source, name, columns[name])
                query_pass.add(batch.num_rows, [columns[name] for name in ids])
                self.passes.compare_full(query_pass)
                yield pa.RecordBatch.from_arrays(
                    [columns[name] for name in wanted], names=list(wanted)
                )
                if self.turn != turn:
                    raise InternalError(
                        "a pass over a query began before the previous pass had ended"
                    )
        self.passes.compare(query_pass)

    def _iterate_batches(self, select: str) -> Generator[pa.RecordBatch]:
        import adbc_driver_manager

        rows = 0
        cursor = self.connection.cursor()
        try:
            _wait_for(cursor, lambda: cursor.execute(select))
            with cursor.fetch_record_batch() as reader:
                for batch in reader:
                    rows += batch.num_rows
                    yield batch
        except adbc_driver_manager.Error as error:
            raise query_error(self.settings.source, error) from None
        except (pa.ArrowException, OSError) as error:
            # An error after the first rows has no error code.
            raise _make_interruption_error(self.settings.source, str(error), rows) from None
        finally:
            with contextlib.suppress(adbc_driver_manager.Error):
                cursor.close()

    def _make_select(self, names: Sequence[str]) -> str:
        """Returns a SELECT for some columns of the query, cast to supported types. Raises
        InputError.
        """
        order = f"\nORDER BY {', '.join(map(str, range(1, len(names) + 1)))}" if self.sorts else ""
        limit = "" if self.settings.first is None else f"\nLIMIT {self.settings.first}"
        return select_of(self.query, self.schema, names, self.settings) + order + limit


def select_of(query: str, schema: pa.Schema, names: Sequence[str], settings: DataSettings) -> str:
    """Returns a SELECT for some columns of a query, cast to supported types. Raises InputError.

    ``schema``: The schema of all columns of the query, from the driver.
    """
    return _wrap_query(
        ", ".join(_cast_column(schema.field(name), settings) for name in names), query
    )


def _cast_column(field: pa.Field, settings: DataSettings) -> str:
    name: str = field.name
    quoted = '"' + name.replace('"', '""') + '"'
    kind = (field.metadata or {}).get(b"POSTGRESQL:type", b"").decode()
    cast = (_ID_CASTS if name in settings.id else _CASTS).get(kind)
    if cast is not None:
        return f"{quoted}::{cast} AS {quoted}"
    types = pa.types
    supported = (
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_string,
        types.is_temporal,
    )
    if not any(is_type(field.type) for is_type in supported) or types.is_interval(field.type):
        kind = kind if kind.isidentifier() else "unknown"
        raise checks.unusable(
            hide_passwords(settings.source),
            f"column {name!r} is of type {kind}, which is not supported. Cast it in data.query, "
            "for example with ::text or ::float8, or leave it out.",
        )
    return quoted


def _wait_for(cursor: Any, call: Callable[[], T]) -> T:
    # In the main thread, ADBC handles Ctrl-C itself and reports it as an error of the query.
    return wait_for(call, cursor.adbc_cancel)


def _wrap_query(columns: str, query: str) -> str:
    """Returns a SELECT from a query. The order of the query's rows is kept, because the outer
    SELECT does not sort, join or split rows.
    """
    return f"SELECT {columns} FROM (\n{query}\n) AS vfl_rows"  # noqa: S608 - the person's own, in their party file


def with_timeout(source: str) -> str:
    """Adds ``connect_timeout`` to a URL that does not set one."""
    if "connect_timeout=" in source or "PGCONNECT_TIMEOUT" in os.environ:
        return source
    return f"{source}{'&' if '?' in source else '?'}connect_timeout={_CONNECT_S}"


def connection_error(source: str, text: str) -> InputError:
    """Returns the error for a failed connection. ``text``: The message of the server."""
    for pattern, problem, fix in _REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return checks.unreadable(
                hide_passwords(source), f"the server {problem}. {fix}{encoding_hint(source)}"
            )
    reason = clean_message(_strip_prefix(text), source, quoted=False)
    return checks.unreadable(
        hide_passwords(source),
        f"the server cannot be queried ({reason}). Correct data.source.{encoding_hint(source)}",
    )


def query_error(source: str, error: Any) -> InputError:
    """Returns the error for a query that failed. The error may show names in the query, but no
    values.
    """
    text, code = str(error), error.sqlstate or ""
    if not code or code == "25006" or code.startswith("57"):
        return _make_interruption_error(source, text, 0)
    reason = clean_message(_strip_prefix(text), source, quoted=code.startswith("42"))
    if code == "42501":
        return checks.unusable(
            hide_passwords(source),
            f"the server refuses data.query ({reason}). Ask for the right to read it.",
        )
    return checks.unusable(
        hide_passwords(source), f"the server refuses data.query ({reason}). Correct data.query."
    )


def _make_interruption_error(source: str, text: str, rows: int) -> InputError:
    """Returns the error for a query that ended early, after ``rows`` rows."""
    if _WRITES.search(text):
        return checks.unusable(
            hide_passwords(source), "data.query must only read. Write one SELECT."
        )
    if _TIMEOUT.search(text):
        return checks.unreadable(
            hide_passwords(source),
            f"the server ended data.query after {rows:,} rows because it took too long. Select "
            "fewer rows, or raise statement_timeout.",
        )
    if _LOST.search(text):
        return checks.unreadable(
            hide_passwords(source), f"the connection was lost after {rows:,} rows. Start again."
        )
    reason = clean_message(_strip_prefix(text), source, quoted=False)
    return checks.unusable(
        hide_passwords(source),
        f"data.query failed after {rows:,} rows ({reason}). Run it in psql to see the value, and "
        "correct it.",
    )


def _strip_prefix(text: str) -> str:
    """Returns a message without its severity or the client's prefix."""
    prefix = _SEVERITY.search(text) or _CLIENT.match(text)
    return text[prefix.end() :] if prefix else text


def _close(connection: Any) -> None:
    import adbc_driver_manager

    with contextlib.suppress(adbc_driver_manager.Error):
        connection.close()
