"""Reads the result of a DuckDB query over files: ``duckdb:SELECT …``. The files may be larger than
memory, because sorting, joining and grouping use the disk.

DuckDB runs in this process. Its settings are locked before the query runs, so it downloads and
installs nothing, and a SELECT cannot write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl_party.data import checks
from vfl_party.data.sources.files import State, state_of
from vfl_party.data.sources.parquet import PARQUET, describe_difference, is_hidden

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

import contextlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import split_duckdb_source
from vfl_common.errors import Code, InputError
from vfl_common.files import lock_file
from vfl_common.text import hide_passwords
from vfl_party.data.sources.databases import (
    SORTED,
    Passes,
    QueryPass,
    clean_message,
    missing_package_error,
    require_dates,
    takes_first,
    wait_for,
)
from vfl_party.data.sources.files import require_same
from vfl_party.data.stream import RowStream

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

T = TypeVar("T")

_BLOCK_ROWS = 1 << 16
# DuckDB's memory as a multiple of ``memory_mib``, its minimum in MiB, and the MiB per thread. With
# 128 MiB per thread, sorting 5 million rows of 80 bytes failed.
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
# The line of an error in a CSV file.
_LINE = re.compile(r"Error on Line: \d+")
# A number that is a value, and not part of a type's name.
_NUMBER = re.compile(r"(?<![A-Za-z0-9])-?\d[\d.,:e+-]*")
_EXTENSION = re.compile(r"INSTALL (\w+);")
# Characters with a special meaning in file_search_path or in file patterns.
_SIGNS = ",*?["


def open_duckdb(settings: DataSettings) -> RowStream:
    """Opens the rows of the SELECT in ``data.source``. Raises InputError if DuckDB refuses it."""
    try:
        import duckdb
    except ImportError:
        raise missing_package_error(settings.source, "duckdb") from None
    source = hide_passwords(settings.source)
    folder, query = split_duckdb_source(settings.source)
    memory = max(_SHARE * settings.memory_mib, _MIN_MIB)
    config = _make_config(memory, source, folder)
    spill = RowSpill(settings.scratch or tempfile.gettempdir())
    config |= {"temp_directory": str(spill.folder)}
    connection = duckdb.connect(":memory:", config=config)
    reading = _Reading(settings, query, connection, Passes(settings), memory)
    reading.close = weakref.finalize(reading, _close, connection, spill)

    def describe_query() -> tuple[bool, list[tuple[str, ...]]]:
        for setting in _SET:
            connection.execute(f"SET {setting}")
        ordered, reading.files = _parse(connection, source, folder, query)
        return ordered, connection.execute(f"DESCRIBE {query}").fetchall()

    try:
        ordered, columns = reading.wait(describe_query)
    except duckdb.Error as error:
        raise reading.refuse(error, None) from None
    # Column names by their lower-case form, because DuckDB does not distinguish case.
    names_by_lower: dict[str, str] = {}
    for name, kind, *_ in columns:
        other = names_by_lower.setdefault(name.lower(), name)
        if name == other and name in reading.types:
            raise checks.unusable(source, f"has two columns {name!r}. Rename one with AS.")
        if other != name:
            raise checks.unusable(
                source, f"has columns {other!r} and {name!r}. Rename one with AS."
            )
        reading.types[name] = kind
    # Otherwise the order does not matter, because the table is sorted by its ids.
    reading.sorts = takes_first(settings) and not ordered
    names, unsorted = tuple(reading.types), "" if ordered else SORTED
    return RowStream(source, names, False, reading.blocks, ordered=False, unsorted=unsorted)


def _do_nothing() -> None:
    pass


@dataclass(eq=False)
class _Reading:
    """A query on a connection, which is open as long as this object lives.

    Args:
        settings: The settings of the table.
        query: The SELECT.
        connection: The connection to DuckDB.
        passes: Compares the passes over the rows.
        memory: The memory limit of DuckDB in MiB.
        types: The types of the columns.
        files: The states of the files when the query was opened.
        sorts: Whether to sort the rows by the id columns, then by the other columns.
        close: Closes the connection early.
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
        """Runs ``call`` in a thread and waits for it. Closes the connection after an error or a
        signal.
        """
        try:
            return wait_for(call, self.connection.interrupt)
        except BaseException:
            self.close()
            raise

    def blocks(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields blocks of rows with the wanted columns. Raises InputError."""
        source = hide_passwords(self.settings.source)
        checks.require_names(source, "columns", wanted, list(self.types))
        ids = [name for name in self.settings.id if name in self.types]
        names = list(dict.fromkeys([*ids, *wanted]))
        query_pass = QueryPass(len(ids))
        self._require_same()
        for batch in self._iterate_batches(names):
            columns = dict(zip(names, batch.columns, strict=True))
            for name in wanted:
                require_dates(source, name, columns[name])
            query_pass.add(batch.num_rows, [columns[name] for name in ids])
            self.passes.compare_full(query_pass)
            yield pa.RecordBatch.from_arrays([columns[name] for name in wanted], list(wanted))
        self._require_same()
        self.passes.compare(query_pass)

    def _require_same(self) -> None:
        for file, names_by_lower in self.files.items():
            require_same(file, names_by_lower)

    def _iterate_batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        import duckdb

        rows, select = 0, self._make_select(names)
        try:
            reader = self.wait(lambda: self.connection.sql(select).to_arrow_reader(_BLOCK_ROWS))
            # The reader is closed, so that two passes are never open at the same time.
            with contextlib.closing(reader):
                while (batch := self.wait(lambda: next(reader, None))) is not None:
                    rows += batch.num_rows
                    yield batch
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            self._require_same()
            raise self.refuse(error, rows) from None

    def _make_select(self, names: Sequence[str]) -> str:
        """Returns a SELECT for some columns of the query, cast to supported types. Raises
        InputError.
        """
        columns = ", ".join(self._cast_column(name) for name in names)
        first = self.settings.first
        order = "\nORDER BY ALL" if self.sorts else ""
        limit = "" if first is None else f"\nLIMIT {first}"
        return f"SELECT {columns} FROM (\n{self.query}\n) AS vfl_rows{order}{limit}"  # noqa: S608 - the person's own

    def _cast_column(self, name: str) -> str:
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
        # As text, an id keeps all its digits.
        cast = "VARCHAR" if cast == "DOUBLE" and name in self.settings.id else cast
        return f"{quoted}::{cast} AS {quoted}"

    def refuse(self, error: Exception, rows: int | None) -> InputError:
        """Returns the error for a query that failed after ``rows`` rows, or before it ran if
        ``rows`` is None. The error shows no values.
        """
        source, text = hide_passwords(self.settings.source), str(error)
        message = text.partition("Error: ")[2] or text
        is_unreadable = text.startswith("IO Error") and rows in (None, 0)
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
                "the query needs more space than data.scratch has. Free disk space, or set "
                "data.scratch to another folder.",
            )
        if "Out of Memory Error" in text:
            return checks.unreadable(
                source,
                f"the query needs more memory than the {self.memory} MiB that DuckDB may take. Set "
                f"data.memory_mib to {2 * self.memory // _SHARE} or more.",
            )
        # This message names files, but shows no values.
        if is_unreadable or _NO_PARQUET.search(text):
            reason = clean_message(message, self.settings.source, quoted=True)
            return checks.unreadable(source, f"DuckDB cannot read ({reason}). Correct data.source.")
        if rows is None:
            reason = clean_message(message, self.settings.source, quoted=True)
            return checks.unusable(
                source, f"DuckDB refuses the query ({reason}). Correct data.source."
            )
        line = _LINE.search(text)
        message = line[0] if line else _NUMBER.sub("…", message)
        reason = clean_message(message, self.settings.source, quoted=False)
        return checks.unusable(
            source,
            f"the query failed after {rows:,} rows ({reason}). Run it in DuckDB to see the value, "
            "and correct it.",
        )


def _make_config(memory: int, source: str, folder: str | None) -> dict[str, Any]:
    """Returns the configuration of DuckDB, with ``memory`` in MiB. Raises InputError if the
    folder's name has a character with a special meaning.
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
    """Returns whether the query has an ORDER BY, and the states of its files. Raises InputError if
    it is not one SELECT, or if a file cannot be used.
    """
    row = connection.execute("SELECT json_serialize_sql(?)", [query]).fetchone()
    parsed: dict[str, Any] = json.loads(row[0] if row else "{}")
    if parsed.get("error_type") == "parser":
        reason = clean_message(str(parsed.get("error_message")), source, quoted=True)
        raise checks.unusable(source, f"DuckDB refuses the query ({reason}). Correct data.source.")
    statements = parsed.get("statements", [])
    if len(statements) != 1:
        raise checks.unusable(source, "the query must only read. Write one SELECT.")
    files = check_files(connection, source, folder, statements)
    modifiers = statements[0]["node"].get("modifiers", [])
    return any(modifier["type"] == "ORDER_MODIFIER" for modifier in modifiers), files


def _close(connection: DuckDBPyConnection, spill: RowSpill) -> None:
    # A second signal may have stopped the query before it ended.
    with contextlib.suppress(Exception):
        connection.close()
    spill.close()


_PREFIX = "vfl-spill-"


class RowSpill:
    """A new folder in ``scratch``. It is locked, so that other processes do not delete it while it
    is in use.

    Raises InputError if the folder cannot be created.
    """

    def __init__(self, scratch: str) -> None:
        try:
            Path(scratch).mkdir(parents=True, exist_ok=True)
            for old_folder in Path(scratch).glob(f"{_PREFIX}*"):
                _delete_unused(old_folder)
            lock = None
            # The lock is None if another process has deleted the folder before it was locked.
            while lock is None:
                self.folder = Path(tempfile.mkdtemp(dir=scratch, prefix=_PREFIX))
                lock = _lock(self.folder)
            self._lock = lock
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{scratch}: cannot hold temporary files ({error.strerror}). Set data.scratch to "
                "another folder.",
            ) from None

    def close(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _delete_unused(folder: Path) -> None:
    lock = _lock(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Locks a folder, and returns its descriptor. Returns None if another process has locked it, or
    if it does not exist.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        if lock_file(descriptor, wait=False) and folder.exists():
            return descriptor
        os.close(descriptor)
    return None


_READS_FILES = re.compile(r"read_\w+|\w+_scan|glob")


_PARQUET = ("read_parquet", "parquet_scan")


# Arguments with which DuckDB does not apply the schema of the first file to all files.
_OWN_SCHEMA = ("union_by_name", "schema")


_PATTERN = re.compile(r"[*?\[]")


_GLOB = "SELECT file FROM glob(?)"


_SCHEMAS = """
SELECT file_name, list({'name': lower(name), 'type': duckdb_type} ORDER BY name)
FROM parquet_schema(?) WHERE duckdb_type IS NOT NULL GROUP BY file_name ORDER BY file_name
"""


@dataclass(frozen=True)
class _Files:
    """The file names and patterns in one place of a query. ``same_columns``: Whether DuckDB reads
    all of them as Parquet files with the columns of the first file.
    """

    names: tuple[str, ...]
    same_columns: bool


def check_files(
    connection: DuckDBPyConnection, source: str, folder: str | None, statements: Any
) -> dict[str, State]:
    """Returns the states of the files of a query.

    Raises InputError if DuckDB would read a file in the working folder, if a pattern includes
    hidden or temporary files, or if Parquet files have different columns. ``folder``: The folder in
    which DuckDB searches. ``statements``: The query, parsed by DuckDB.
    """
    # DuckDB also searches the working folder if a file is not in ``folder``.
    base = Path(folder or ".")
    for text in set(_iterate_texts(statements)):
        if re.search(r"[./]", text) and not (base / text).exists() and Path(text).is_file():
            raise checks.unreadable(
                source,
                f"{text} is in the folder where this program runs, not in {base}. Move it, or "
                "write its full path.",
            )
    states: dict[str, State] = {}
    for files in _find_files(statements):
        for name in filter(_PATTERN.search, files.names):
            _refuse_hidden(connection, source, base, name)
        if files.same_columns:
            _require_same_columns(connection, source, files.names)
        for name in files.names:
            matched_files = connection.execute(_GLOB, [name]).fetchall()
            states |= {file: state_of(file) for (file,) in matched_files if Path(file).is_file()}
    return states


def _refuse_hidden(connection: DuckDBPyConnection, source: str, base: Path, pattern: str) -> None:
    """Raises InputError if a pattern includes hidden or temporary files, such as Spark's unfinished
    files in ``_temporary``.
    """
    parts = Path(pattern).parts
    fixed_parts = next(place for place, part in enumerate(parts) if _PATTERN.search(part))
    if is_hidden(parts[fixed_parts:]):
        return
    # Only the part of the path after the pattern's fixed folder is checked.
    above = base.joinpath(*parts[:fixed_parts])
    for (name,) in connection.execute(_GLOB, [pattern]).fetchall():
        file = Path(name)
        relative_path = file.relative_to(above) if file.is_relative_to(above) else Path(file.name)
        if is_hidden(relative_path.parts):
            raise checks.unreadable(
                source,
                f"{pattern} also takes {relative_path}, which is hidden or temporary by its name. "
                "Delete it, or write a pattern that does not take it.",
            )


def _require_same_columns(
    connection: DuckDBPyConnection, source: str, names: tuple[str, ...]
) -> None:
    """Raises InputError if the columns of Parquet files differ, because DuckDB ignores columns that
    the first file lacks, and converts values to the first file's types.
    """
    schemas = [
        (name, {column["name"]: column["type"] for column in columns})
        for name, columns in connection.execute(_SCHEMAS, [list(names)]).fetchall()
    ]
    for name, schema in schemas[1:]:
        first, other = schemas[0]
        if schema != other:
            # Files in different partition folders may have the same name, so the folders are shown.
            common_folder = commonpath([first, name])
            problem = describe_difference(
                other, schema, relpath(first, common_folder), relpath(name, common_folder)
            )
            files = f"'{names[0]}'" if len(names) == 1 else "[…]"
            raise checks.unreadable(
                source,
                f"{problem}. Write the files with the same columns, or read them with "
                f"read_parquet({files}, union_by_name = true).",
            )


def _find_files(node: Any) -> Iterator[_Files]:
    """Yields the files that a node of a parsed query names."""
    if isinstance(node, dict) and node.get("type") == "BASE_TABLE":
        name = str(node.get("table_name"))
        yield _Files((name,), name.lower().endswith(PARQUET))
    if isinstance(node, dict) and node.get("type") == "TABLE_FUNCTION":
        call = node.get("function", {})
        kind, arguments = str(call.get("function_name")), call.get("arguments", [])
        if _READS_FILES.fullmatch(kind) and arguments:
            has_own_schema = not {*_iterate_texts(arguments[1:])}.isdisjoint(_OWN_SCHEMA)
            yield _Files(
                tuple(_iterate_literals(arguments[0])), kind in _PARQUET and not has_own_schema
            )
    for child in _list_children(node):
        yield from _find_files(child)


def _iterate_literals(node: Any) -> Iterator[str]:
    if isinstance(node, dict) and node.get("kind") == "STRING":
        yield str(node.get("text"))
    for child in _list_children(node):
        yield from _iterate_literals(child)


def _iterate_texts(node: Any) -> Iterator[str]:
    """Yields the texts of a parsed query that may be names of files."""
    if isinstance(node, str) and 0 < len(node) < 256 and "\0" not in node:
        yield node
    for child in _list_children(node):
        yield from _iterate_texts(child)


def _list_children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
