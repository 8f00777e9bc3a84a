"""Queries PostgreSQL for rows by id through ADBC. Ids are an argument, never part of the query."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.text import hide_passwords
from vfl_party.data import checks
from vfl_party.data.choice import choose
from vfl_party.data.sources.databases import (
    missing_package_error,
    query_of,
    require_dates,
)
from vfl_party.data.sources.postgres import connection_error, query_error, select_of, with_timeout
from vfl_serve.stores.alchemy import name_keys, row_limit, too_many, with_ids
from vfl_serve.stores.seam import BrokenError, ConnectionPool, IdBatch, ValueMismatchError

# Maximum time of a query, since its caller has given up by then.
_LONGEST_MS = 10_000
_BEGIN = (
    "SET default_transaction_read_only = on",
    f"SET statement_timeout = {_LONGEST_MS}",
)
# These settings close connections to a server that is unreachable.
_ALIVE = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": _LONGEST_MS,
}
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}")
# Error codes of the server: a value does not fit its type (class 22); the statement was cancelled.
_NO_VALUE, _ENDED = "22", "57014"


@dataclass(frozen=True)
class _PreparedQuery:
    """The final query, and the type of its ids."""

    select: str
    kind: pa.DataType


class PostgresRows:
    """Rows of a PostgreSQL database; see ``seam.Source``."""

    def __init__(self, settings: DataSettings, connections: int) -> None:
        self.settings = settings
        with name_keys():
            self._query = with_ids(query_of(settings), "$1", settings.source)
        self._pool: ConnectionPool[Any] = ConnectionPool(
            self._open, lambda connection: connection.close(), connections, _cancel
        )
        self._prepared: _PreparedQuery | None = None

    def check(self) -> None:
        """Prepares the query and runs it without ids. Raises InputError."""
        with name_keys():
            connection = self._open()
            try:
                self._prepared = self._describe(connection)
                self._fetch(connection, [])
            finally:
                connection.close()

    def rows(self, ids: Sequence[str], until_s: float) -> IdBatch:
        """See ``seam.Source``."""
        with name_keys():
            return IdBatch(
                self._pool.run(lambda connection: self._fetch(connection, ids), until_s), False
            )

    def close(self) -> None:
        """Closes the connections."""
        self._pool.close()

    def _open(self) -> Any:
        try:
            import adbc_driver_manager
            from adbc_driver_postgresql import dbapi
        except ImportError:
            raise missing_package_error(self.settings.source, "adbc-driver-postgresql") from None
        try:
            connection = dbapi.connect(_with_keepalive(self.settings.source), autocommit=True)
            with connection.cursor() as cursor:
                for statement in _BEGIN:
                    cursor.execute(statement)
        except adbc_driver_manager.Error as error:
            raise connection_error(self.settings.source, str(error)) from None
        return connection

    def _describe(self, connection: Any) -> _PreparedQuery:
        """Prepares the query on the server. Raises InputError."""
        import adbc_driver_manager

        settings, source = self.settings, hide_passwords(self.settings.source)
        try:
            with connection.cursor() as cursor:
                parameters = cursor.adbc_prepare(self._query)
                schema = cursor.adbc_execute_schema(self._query)
        except adbc_driver_manager.Error as error:
            raise query_error(settings.source, error) from None
        chosen = choose(source, list(schema.names), settings, False)
        # There is no parameter if the placeholder is in a comment.
        kind = parameters.field(0).type if len(parameters) else pa.null()
        inner = kind.value_type if pa.types.is_list(kind) else None
        if inner is None or not (pa.types.is_integer(inner) or pa.types.is_string(inner)):
            raise checks.unusable(
                source,
                "data.query must compare :ids with text or integers. Write, for example, "
                "WHERE id::text = ANY(:ids).",
            )
        names = list(dict.fromkeys([*chosen.id, *chosen.features]))
        return _PreparedQuery(select_of(self._query, schema, names, settings), inner)

    def _fetch(self, connection: Any, ids: Sequence[str]) -> pa.Table:
        import adbc_driver_manager

        prepared, source = self._prepared, hide_passwords(self.settings.source)
        assert prepared is not None  # noqa: S101 - check comes first
        max_rows = row_limit(len(ids))
        values = pa.array([_to_values(ids, prepared.kind)], pa.list_(prepared.kind))
        try:
            with connection.cursor() as cursor:
                cursor.execute(
                    f"{prepared.select}\nLIMIT {max_rows + 1}", pa.record_batch({"ids": values})
                )
                table = cursor.fetch_arrow_table()
        except adbc_driver_manager.Error as error:
            raise self._to_error(error) from None
        if table.num_rows > max_rows:
            raise too_many(source, len(ids), max_rows)
        for name in table.column_names:
            for chunk in table[name].chunks:
                require_dates(source, name, chunk)
        return table

    def _to_error(self, error: Any) -> Exception:
        code = error.sqlstate or ""
        if code == _ENDED:
            return TimeoutError()
        refusal = query_error(self.settings.source, error)
        if code.startswith(_NO_VALUE):
            return ValueMismatchError(refusal.code, str(refusal))
        lost = not code or code.startswith(("08", "57"))
        return BrokenError(refusal.code, str(refusal)) if lost else refusal


def _with_keepalive(source: str) -> str:
    """Returns the URL with default timeouts for an unreachable server."""
    url = with_timeout(source)
    parameters = [f"{key}={value}" for key, value in _ALIVE.items() if f"{key}=" not in url]
    return "&".join([url, *parameters]) if "?" in url else f"{url}?{'&'.join(parameters)}"


def _to_values(ids: Sequence[str], kind: pa.DataType) -> list[Any]:
    """Returns the ids that are values of ``kind``. Other ids are unknown."""
    if pa.types.is_string(kind):
        # Texts of PostgreSQL cannot contain NUL.
        return [name for name in ids if "\0" not in name]
    bounds = np.iinfo(kind.to_pandas_dtype())
    numbers = [int(text) for text in ids if _INTEGER.fullmatch(text)]
    return [number for number in numbers if bounds.min <= number <= bounds.max]


def _cancel(connection: Any) -> None:
    with contextlib.suppress(Exception):
        connection.adbc_cancel()
