"""Reads a table from a database: the rows of one query."""

from __future__ import annotations

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import is_duckdb
from vfl_party.data.sources.databases.alchemy import open_alchemy
from vfl_party.data.sources.databases.duck import open_duckdb
from vfl_party.data.sources.databases.postgres import open_postgres
from vfl_party.data.stream import RowStream


def open_database(settings: DataSettings) -> RowStream:
    """Opens the rows of a database query. ``postgresql://`` is read through ADBC, ``duckdb:SELECT
    …`` through DuckDB, and other URLs through SQLAlchemy.

    Passwords appear neither in the stream's source nor in errors. Raises InputError.
    """
    if is_duckdb(settings.source):
        return open_duckdb(settings)
    if settings.source.startswith(("postgresql://", "postgres://")):
        return open_postgres(settings)
    return open_alchemy(settings)
