"""Reads official files of columns block by block, with the published types."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_papers.dataset import AGAIN, BLOCK_ROWS, Array, Rows, damage_error

FLOAT, BYTE, WORD = pa.float32(), pa.uint8(), pa.string()
Types = Mapping[str, pa.DataType]


@dataclass(frozen=True)
class ColumnFiles:
    """Files with the same columns, which are read as one table.

    Args:
        files: The files as data sources, each with the keys of ``[data]`` for its layout.
        types: {column: type} of the columns to read, in any order.
        missing: Whether a cell may be empty.
    """

    files: tuple[DataSettings, ...]
    types: Types
    missing: bool = False

    def of(self, types: Types) -> ColumnFiles:
        """Returns a reader of other columns of the same files."""
        return replace(self, types=types)

    def batches(self) -> Iterator[pa.Table]:
        """Yields all rows in blocks. Raises InputError if a file differs from the published one."""
        from vfl_party.data.load import open_table

        for file in self.files:
            seen = 0
            with _replace_fixes():
                stream = open_table(file)
            if stream is None or not {*self.types} <= {*stream.names}:
                missing = [n for n in self.types if stream is None or n not in stream.names]
                raise damage_error(file.source, f"has no column {missing[0]!r}")
            with _replace_fixes():
                for batch in stream.blocks(list(self.types)):
                    yield pa.table(
                        {
                            name: self._cast_column(file.source, name, batch.column(name), seen)
                            for name in self.types
                        }
                    )
                    seen += batch.num_rows

    def blocks(self, rows: Rows) -> Iterator[pa.Table]:
        """Yields the rows with the given numbers, which must increase, in blocks. Raises
        InputError.
        """
        return select_rows(self.batches(), rows, self.files[0].source)

    def by_file(self, name: str) -> list[Array]:
        """Returns a column as one array [N] for each file. Raises InputError."""
        columns = []
        for file in self.files:
            only = replace(self, files=(file,), types={name: self.types[name]})
            parts = [batch.column(0).to_numpy() for batch in only.batches()]
            if not parts:
                raise damage_error(file.source, "has no rows")
            columns.append(np.concatenate(parts))
        return columns

    def array(self, name: str) -> Array:
        """Returns a column of all files, [N]. Raises InputError."""
        return np.concatenate(self.by_file(name))

    def _cast_column(self, source: str, name: str, column: pa.Array, seen: int) -> pa.Array:
        kind = self.types[name]
        text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        if text and kind != WORD:
            column = pc.utf8_trim_whitespace(column)
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
        try:
            result = pc.cast(column, kind)
        except pa.ArrowInvalid:
            row = seen + 1 + next(at for at, cell in enumerate(column) if not _fits(cell, kind))
            raise damage_error(source, f"row {row:,} has no number in column {name!r}") from None
        if result.null_count and not self.missing:
            row = seen + 1 + int(np.argmax(result.is_null().to_numpy(zero_copy_only=False)))
            raise damage_error(source, f"row {row:,} has an empty cell in column {name!r}")
        return result


def _fits(cell: pa.Scalar, kind: pa.DataType) -> bool:
    try:
        cell.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def select_rows(batches: Iterator[pa.Table], rows: Rows, source: str) -> Iterator[pa.Table]:
    """Selects rows from blocks.

    Args:
        batches: All rows, in blocks.
        rows: The numbers of the rows to select, increasing, [n].
        source: The name of the file in error messages.

    Yields the selected rows in blocks. Raises InputError if there are fewer rows.
    """
    start = done = 0
    for batch in batches:
        end = start + batch.num_rows
        until = int(np.searchsorted(rows, end))
        for first in range(done, until, BLOCK_ROWS):
            own = rows[first : min(first + BLOCK_ROWS, until)] - start
            yield batch.take(pa.array(own))
        start, done = end, until
        if done == len(rows):
            return
    raise damage_error(source, f"has {start:,} rows, but more labels")


def join_columns(parts: Sequence[Iterator[pa.Table]], source: str) -> Iterator[pa.Table]:
    """Yields tables with the columns of all ``parts``, whose blocks may have different sizes.

    Raises InputError, which names ``source``, if one part has more rows than another.
    """
    left: list[pa.Table | None] = [None] * len(parts)
    while True:
        for place, part in enumerate(parts):
            if left[place] is None:
                left[place] = next((table for table in part if len(table)), None)
        tables = [table for table in left if table is not None]
        if not tables:
            return
        if len(tables) < len(parts):
            raise damage_error(source, "has files with different numbers of rows")
        size = min(len(table) for table in tables)
        columns = (
            (name, table.column(name).slice(0, size))
            for table in tables
            for name in table.column_names
        )
        yield pa.table(dict(columns))
        left = [table.slice(size) if len(table) > size else None for table in tables]


@contextlib.contextmanager
def _replace_fixes() -> Iterator[None]:
    """Replaces the fix in an error of a party's reader by ``AGAIN``, because ``vfl prepare`` has no
    keys of ``[data]`` to change.
    """
    try:
        yield
    except InputError as error:
        if AGAIN in str(error):
            raise
        problem = re.split(r"; |\.? (?=[A-Z][a-z]+ [^:]*\.$)", str(error), maxsplit=1)[0]
        raise InputError(Code.FILE_INVALID, f"{problem}. {AGAIN}.") from None


class FileTree:
    """A folder, or an archive of one, in which files are found by the end of their path.

    The constructor raises InputError if the folder or archive cannot be read.
    """

    def __init__(self, path: Path) -> None:
        from vfl_party.data.sources.files import BROKEN, members

        self.path = path
        try:
            self.names = (
                [entry.relative_to(path).as_posix() for entry in path.rglob("*")]
                if path.is_dir()
                else members(str(path))
            )
        except BROKEN:
            raise damage_error(str(path), "cannot be read to the end") from None

    def source(self, name: str) -> str:
        """Returns the name of a file as a data source. Raises InputError unless there is one."""
        matches = [known for known in self.names if f"/{known}".endswith(f"/{name}")]
        if len(matches) != 1:
            raise damage_error(
                str(self.path),
                f"holds several files {name}" if matches else f"holds no file {name}",
            )
        return f"{self.path}/{matches[0]}"


def file(source: str | Path, **layout: Any) -> DataSettings:
    """Returns a file as a data source. ``layout``: The keys of ``[data]`` for its layout."""
    return DataSettings(source=str(source), **layout)


def row_count_note(rows: int, published: int) -> tuple[str, ...]:
    """Returns a note if the files have more or fewer rows than published; () if not."""
    if rows == published:
        return ()
    return (f"The files have {rows:,} rows (published: {published:,}).",)
