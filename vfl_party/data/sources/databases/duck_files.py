"""Checks the files of a DuckDB query, because DuckDB silently includes hidden files, leaves out
columns and rounds values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl_party.data import checks
from vfl_party.data.sources.parquet import PARQUET, describe_difference, is_hidden
from vfl_party.data.sources.unchanged import State, state_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

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
