"""Checks the files of a DuckDB query: what DuckDB silently includes, leaves out or rounds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl_party.data import checks
from vfl_party.data.sources.parquet import PARQUET, difference, is_hidden
from vfl_party.data.sources.unchanged import State, state_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_READS_FILES = re.compile(r"read_\w+|\w+_scan|glob")
_PARQUET = ("read_parquet", "parquet_scan")
# Arguments of a call that reads files by a given schema, not by that of the first file.
_OWN_SCHEMA = ("union_by_name", "schema")
_PATTERN = re.compile(r"[*?\[]")
_GLOB = "SELECT file FROM glob(?)"
_SCHEMAS = """
SELECT file_name, list({'name': lower(name), 'type': duckdb_type} ORDER BY name)
FROM parquet_schema(?) WHERE duckdb_type IS NOT NULL GROUP BY file_name ORDER BY file_name
"""


@dataclass(frozen=True)
class _Files:
    """Names and patterns of files in one place of a query; ``same_columns``: whether they are
    Parquet files that all get the columns of the first one.
    """

    names: tuple[str, ...]
    same_columns: bool


def check_files(
    connection: DuckDBPyConnection, source: str, folder: str | None, statements: Any
) -> dict[str, State]:
    """Returns the states of the files of a query.

    Raises InputError if DuckDB takes a file from the working folder, a pattern includes hidden or
    temporary files, or Parquet files have different columns. ``folder``: where DuckDB searches;
    ``statements``: the query, as parsed by DuckDB.
    """
    # DuckDB looks in the working folder, too, if a file is not in the one that it was given.
    base = Path(folder or ".")
    for text in set(_texts(statements)):
        if re.search(r"[./]", text) and not (base / text).exists() and Path(text).is_file():
            raise checks.unreadable(
                source,
                f"{text} is in the folder where this program runs, not in {base}. Move it, or "
                "write its full path.",
            )
    states: dict[str, State] = {}
    for files in _files(statements):
        for name in filter(_PATTERN.search, files.names):
            _refuse_hidden(connection, source, base, name)
        if files.same_columns:
            _require_same_columns(connection, source, files.names)
        for name in files.names:
            taken = connection.execute(_GLOB, [name]).fetchall()
            states |= {file: state_of(file) for (file,) in taken if Path(file).is_file()}
    return states


def _refuse_hidden(connection: DuckDBPyConnection, source: str, base: Path, pattern: str) -> None:
    """Raises InputError if a pattern includes hidden or temporary files: Spark keeps unfinished
    ones in folders such as ``_temporary``.
    """
    parts = Path(pattern).parts
    fixed = next(place for place, part in enumerate(parts) if _PATTERN.search(part))
    if is_hidden(parts[fixed:]):
        return
    # The folder that the pattern names may be called as it likes.
    above = base.joinpath(*parts[:fixed])
    for (name,) in connection.execute(_GLOB, [pattern]).fetchall():
        file = Path(name)
        below = file.relative_to(above) if file.is_relative_to(above) else Path(file.name)
        if is_hidden(below.parts):
            raise checks.unreadable(
                source,
                f"{pattern} also takes {below}, which is hidden or temporary by its name. Delete "
                "it, or write a pattern that does not take it.",
            )


def _require_same_columns(
    connection: DuckDBPyConnection, source: str, names: tuple[str, ...]
) -> None:
    """Raises InputError if Parquet files differ: DuckDB leaves out columns that the first file
    lacks, and rounds to its types.
    """
    schemas = [
        (name, {column["name"]: column["type"] for column in columns})
        for name, columns in connection.execute(_SCHEMAS, [list(names)]).fetchall()
    ]
    for name, schema in schemas[1:]:
        first, other = schemas[0]
        if schema != other:
            # In folders of partitions, files may have the same name.
            above = commonpath([first, name])
            problem = difference(other, schema, relpath(first, above), relpath(name, above))
            files = f"'{names[0]}'" if len(names) == 1 else "[…]"
            raise checks.unreadable(
                source,
                f"{problem}. Write the files with the same columns, or read them with "
                f"read_parquet({files}, union_by_name = true).",
            )


def _files(node: Any) -> Iterator[_Files]:
    """Yields the files that a parsed query names."""
    if isinstance(node, dict) and node.get("type") == "BASE_TABLE":
        name = str(node.get("table_name"))
        yield _Files((name,), name.lower().endswith(PARQUET))
    if isinstance(node, dict) and node.get("type") == "TABLE_FUNCTION":
        call = node.get("function", {})
        kind, arguments = str(call.get("function_name")), call.get("arguments", [])
        if _READS_FILES.fullmatch(kind) and arguments:
            own = not {*_texts(arguments[1:])}.isdisjoint(_OWN_SCHEMA)
            yield _Files(tuple(_literals(arguments[0])), kind in _PARQUET and not own)
    for child in _children(node):
        yield from _files(child)


def _literals(node: Any) -> Iterator[str]:
    if isinstance(node, dict) and node.get("kind") == "STRING":
        yield str(node.get("text"))
    for child in _children(node):
        yield from _literals(child)


def _texts(node: Any) -> Iterator[str]:
    """Yields the texts of a parsed query that may be names of files."""
    if isinstance(node, str) and 0 < len(node) < 256 and "\0" not in node:
        yield node
    for child in _children(node):
        yield from _texts(child)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
