"""Reads a table that DuckDB makes of files: ``duckdb:SELECT …``. The files may be larger than
memory; sorting, joining and grouping use the disk.

DuckDB runs in this process. Its settings are locked before the query runs: it neither downloads nor
installs anything, and a SELECT cannot write.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import folder_and_query
from vfl_common.errors import InputError
from vfl_common.passwords import hide_passwords
from vfl_party.data import checks
from vfl_party.data.sources.databases.duck_files import check_files
from vfl_party.data.sources.databases.query import (
    SORTED,
    Passes,
    QueryPass,
    missing_package_error,
    require_dates,
    takes_first,
    wait_for,
    words,
)
from vfl_party.data.sources.databases.spill import RowSpill
from vfl_party.data.sources.unchanged import State, require_same
from vfl_party.data.stream import RowStream

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

T = TypeVar("T")

_BLOCK_ROWS = 1 << 16
# Multiple of ``memory_mib`` for DuckDB, its minimum to sort, and MiB a thread: 5 million rows
# of 80 bytes failed with 128 MiB for each thread.
_SHARE, _MIN_MIB, _THREAD_MIB = 4, 512, 512
_KEEPS = re.compile(
    r"BOOLEAN|U?(TINYINT|SMALLINT|INTEGER|BIGINT)|FLOAT|DOUBLE|VARCHAR|DATE"
    r"|TIMESTAMP( WITH TIME ZONE)?|\"NULL\""
)
_CASTS = (
    (re.compile(r"DECIMAL\(.*\)|U?HUGEINT|BIGNUM"), "DOUBLE"),
    (re.compile(r"UUID|ENUM\(.*\)", re.DOTALL), "VARCHAR"),
    (re.compile(r"TIMESTAMP_(S|MS|NS)"), "TIMESTAMP"),
)
_SET = ("TimeZone = 'UTC'", "enable_progress_bar = false", "lock_configuration = true")
_NO_PARQUET = re.compile("too small to be a Parquet file|No magic bytes found")
_NO_SPACE = re.compile("max_temp_directory_size|No space left on device")
# The place of an error in a CSV file.
_LINE = re.compile(r"Error on Line: \d+")
# A number that is a value, not part of a type's name.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])-?\d[\d.,:e+-]*")
_EXTENSION = re.compile(r"INSTALL (\w+);")
# Characters with a meaning in file_search_path and in file patterns.
_SIGNS = ",*?["


def open_duckdb(settings: DataSettings) -> RowStream:
    """Opens the rows of the SELECT in ``data.source``. Raises InputError if DuckDB refuses it."""
    try:
        import duckdb
    except ImportError:
        raise missing_package_error(settings.source, "duckdb") from None
    source = hide_passwords(settings.source)
    folder, query = folder_and_query(settings.source)
    memory = max(_SHARE * settings.memory_mib, _MIN_MIB)
    config = _config(memory, source, folder)
    spill = RowSpill(settings.scratch or tempfile.gettempdir())
    config |= {"temp_directory": str(spill.folder)}
    connection = duckdb.connect(":memory:", config=config)
    reading = _Reading(settings, query, connection, Passes(settings), memory)
    reading.close = weakref.finalize(reading, _close, connection, spill)

    def look() -> tuple[bool, list[tuple[str, ...]]]:
        for setting in _SET:
            connection.execute(f"SET {setting}")
        ordered, reading.files = _parse(connection, source, folder, query)
        return ordered, connection.execute(f"DESCRIBE {query}").fetchall()

    try:
        ordered, described = reading.wait(look)
    except duckdb.Error as error:
        raise reading.refuse(error, None) from None
    # Column names by their lower case: DuckDB does not distinguish case.
    before: dict[str, str] = {}
    for name, kind, *_ in described:
        other = before.setdefault(name.lower(), name)
        if name == other and name in reading.types:
            raise checks.unusable(source, f"has two columns {name!r}. Rename one with AS.")
        if other != name:
            raise checks.unusable(
                source, f"has columns {other!r} and {name!r}. Rename one with AS."
            )
        reading.types[name] = kind
    # Otherwise the order does not matter: a table is sorted by its ids.
    reading.sorts = takes_first(settings) and not ordered
    names, unsorted = tuple(reading.types), "" if ordered else SORTED
    return RowStream(source, names, False, reading.blocks, ordered=False, unsorted=unsorted)


def _do_nothing() -> None:
    pass


@dataclass(eq=False)
class _Reading:
    """A query on a connection, which is open as long as this object lives.

    Args:
        types: of its columns.
        files: their states when it was opened.
        memory: of DuckDB, in MiB.
        sorts: whether its rows are sorted by the id columns, then by the others.
        close: closes it early.
    """

    settings: DataSettings
    query: str
    connection: DuckDBPyConnection
    passes: Passes
    memory: int
    types: dict[str, str] = field(default_factory=dict)
    files: dict[str, State] = field(default_factory=dict)
    sorts: bool = False
    close: Callable[[], Any] = _do_nothing

    def wait(self, call: Callable[[], T]) -> T:
        """Has a thread wait for DuckDB, and cleans up if that fails or a signal ends it."""
        try:
            return wait_for(call, self.connection.interrupt)
        except BaseException:
            self.close()
            raise

    def blocks(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Reads the wanted columns. Raises InputError."""
        source = hide_passwords(self.settings.source)
        checks.require_names(source, "columns", wanted, list(self.types))
        ids = [name for name in self.settings.id if name in self.types]
        names = list(dict.fromkeys([*ids, *wanted]))
        seen = QueryPass(len(ids))
        self._require_same()
        for batch in self._batches(names):
            columns = dict(zip(names, batch.columns, strict=True))
            for name in wanted:
                require_dates(source, name, columns[name])
            seen.add(batch.num_rows, [columns[name] for name in ids])
            self.passes.compare_full(seen)
            yield pa.RecordBatch.from_arrays([columns[name] for name in wanted], list(wanted))
        self._require_same()
        self.passes.compare(seen)

    def _require_same(self) -> None:
        for file, before in self.files.items():
            require_same(file, before)

    def _batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        import duckdb

        rows, select = 0, self._select(names)
        try:
            reader = self.wait(lambda: self.connection.sql(select).to_arrow_reader(_BLOCK_ROWS))
            # Two passes at once would take turns.
            with contextlib.closing(reader):
                while (batch := self.wait(lambda: next(reader, None))) is not None:
                    rows += batch.num_rows
                    yield batch
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            self._require_same()
            raise self.refuse(error, rows) from None

    def _select(self, names: Sequence[str]) -> str:
        """Returns the query for some of its columns, cast to supported types. Raises InputError."""
        columns = ", ".join(self._column(name) for name in names)
        first = self.settings.first
        order = "\nORDER BY ALL" if self.sorts else ""
        limit = "" if first is None else f"\nLIMIT {first}"
        return f"SELECT {columns} FROM (\n{self.query}\n) AS vfl_rows{order}{limit}"  # noqa: S608 - the person's own

    def _column(self, name: str) -> str:
        quoted, kind = '"' + name.replace('"', '""') + '"', self.types[name]
        if _KEEPS.fullmatch(kind):
            return quoted
        cast = next((type_ for pattern, type_ in _CASTS if pattern.fullmatch(kind)), None)
        if cast is None:
            raise checks.unusable(
                hide_passwords(self.settings.source),
                f"column {name!r} is of type {kind.partition('(')[0]}, which is not supported. "
                "Cast it in the query, for example with ::VARCHAR or ::DOUBLE, or leave it out.",
            )
        # An id keeps all its digits as text.
        cast = "VARCHAR" if cast == "DOUBLE" and name in self.settings.id else cast
        return f"{quoted}::{cast} AS {quoted}"

    def refuse(self, error: Exception, rows: int | None) -> InputError:
        """Returns the error for a query that failed before it ran (None) or after ``rows`` rows. It
        shows no values.
        """
        source, text = hide_passwords(self.settings.source), str(error)
        message = text.partition("Error: ")[2] or text
        unread = text.startswith("IO Error") and rows in (None, 0)
        extension = _EXTENSION.search(text)
        if extension is not None:
            return checks.unusable(
                source,
                f"needs the extension {extension[1]} of DuckDB, but extensions are not loaded. "
                "Copy the files to this machine, and read them as Parquet.",
            )
        if _NO_SPACE.search(text):
            return checks.unreadable(
                source,
                "the query writes more to data.scratch than there is room. Make room, or set "
                "data.scratch to another folder.",
            )
        if "Out of Memory Error" in text:
            return checks.unreadable(
                source,
                f"the query needs more memory than the {self.memory} MiB that DuckDB may take. Set "
                f"data.memory_mib to {2 * self.memory // _SHARE} or more.",
            )
        # This message names files, and no values.
        if unread or _NO_PARQUET.search(text):
            reason = words(message, self.settings.source, quoted=True)
            return checks.unreadable(source, f"DuckDB cannot read ({reason}). Correct data.source.")
        if rows is None:
            reason = words(message, self.settings.source, quoted=True)
            return checks.unusable(
                source, f"DuckDB refuses the query ({reason}). Correct data.source."
            )
        line = _LINE.search(text)
        message = line[0] if line else _NUMBER.sub("…", message)
        reason = words(message, self.settings.source, quoted=False)
        return checks.unusable(
            source,
            f"the query failed after {rows:,} rows ({reason}). Run it in DuckDB to see the value, "
            "and correct it.",
        )


def _config(memory: int, source: str, folder: str | None) -> dict[str, Any]:
    """Returns the settings of DuckDB, with ``memory`` in MiB. Raises InputError for a folder name
    that it misreads.
    """
    config = {
        "memory_limit": f"{memory}MiB",
        "threads": str(max(1, min(os.cpu_count() or 1, memory // _THREAD_MIB))),
        "preserve_insertion_order": "true",
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "allow_community_extensions": "false",
        "allow_persistent_secrets": "false",
    }
    if folder is None:
        return config
    sign = next((character for character in _SIGNS if character in folder), None)
    if sign is not None:
        raise checks.unreadable(
            source,
            f"DuckDB cannot look for files in {folder}, because its name has a {sign!r}. Move the "
            "party file to another folder.",
        )
    return config | {"file_search_path": folder}


def _parse(
    connection: DuckDBPyConnection, source: str, folder: str | None, query: str
) -> tuple[bool, dict[str, State]]:
    """Returns whether the query has an order, and its files. Raises InputError if it is not one
    SELECT, or for its files.
    """
    row = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    parsed: dict[str, Any] = json.loads(row[0] if row else "{}")
    if parsed.get("error_type") == "parser":
        reason = words(str(parsed.get("error_message")), source, quoted=True)
        raise checks.unusable(source, f"DuckDB refuses the query ({reason}). Correct data.source.")
    statements = parsed.get("statements", [])
    if len(statements) != 1:
        raise checks.unusable(source, "must only read. Write one SELECT.")
    files = check_files(connection, source, folder, statements)
    modifiers = statements[0]["node"].get("modifiers", [])
    return any(modifier["type"] == "ORDER_MODIFIER" for modifier in modifiers), files


def _close(connection: DuckDBPyConnection, spill: RowSpill) -> None:
    # A second signal may have stopped the query before it ended.
    with contextlib.suppress(Exception):
        connection.close()
    spill.close()
