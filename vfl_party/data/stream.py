"""Defines a stream of a table's rows in blocks, the result of every reader of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import ROW
from vfl_party.data import checks
from vfl_party.data.vocabulary import decode

# The mark in front of a cell's text if Excel or a database stored the cell as a number. Such a text
# has a decimal point and no thousands separator, regardless of other cells. The mark is a
# private-use character, with which no text begins.
NUMBER = "\ue000"


@dataclass(frozen=True)
class RowStream:
    """The rows of a table in blocks, so that a table may be larger than memory.

    Args:
        source: The name of the table in errors, without a password.
        names: The names of all columns, in the order of the table.
        as_written: Whether cells are text whose type must be found, as in a CSV file. Cells that
            were numbers then begin with ``NUMBER``. Otherwise columns have declared types.
        blocks: Reads the wanted columns from the beginning of the table, in blocks. It may be
            called several times. It raises InputError if the table cannot be read, or has changed
            since it was opened.
        separator: The separator between the cells of a text file.
        notes: Notes for people about guesses of the reader.
        late_notes: More notes, which are complete after the last block.
        ordered: Whether the rows have the same order in each pass.
        unsorted: A note for settings that select rows by position, if the rows have no order.
    """

    source: str
    names: tuple[str, ...]
    as_written: bool
    blocks: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    separator: str | None = None
    notes: tuple[str, ...] = ()
    late_notes: list[str] = field(default_factory=list)
    ordered: bool = True
    unsorted: str = ""


def without_headers(stream: RowStream) -> RowStream:
    """Returns the same stream with a check: its blocks raise InputError if a row repeats the column
    names.

    Concatenated files have such rows, because of which columns of numbers are read as categories.
    """

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        row_count = 0
        for batch in stream.blocks(wanted):
            position = _find_header(batch)
            if position >= 0:
                raise checks.unusable(
                    stream.source,
                    f"{checks.rows(stream.source, row_count + position + 1)} repeats the names of "
                    "the columns, as when files are concatenated. Delete the row.",
                )
            yield batch
            row_count += batch.num_rows

    return replace(stream, blocks=blocks) if stream.as_written else stream


def _find_header(batch: pa.RecordBatch) -> int:
    """Returns the position of the first row whose cells are the column names; -1 if there is
    none.
    """
    # In a single column, a cell may have the column's name by chance.
    if batch.num_columns < 2:
        return -1
    rows = pa.array(np.arange(batch.num_rows))
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_name = pc.equal(pc.utf8_trim_whitespace(column.take(rows)), name)
        rows = rows.filter(pc.fill_null(is_name, False))
        if not len(rows):
            return -1
    return int(rows[0].as_py())


def with_row_numbers(stream: RowStream) -> RowStream:
    """Returns the same stream with a first column ``row``: the row number from 0, as text.

    Raises InputError if the rows have no order.
    """
    if not stream.ordered:
        raise checks.unusable(
            stream.source,
            f'data.id = "{ROW}" is the row number, but the rows of a database have no order. Name '
            "an id column.",
        )

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # At least one column is read, because the block's number of rows is needed.
        other_columns = [name for name in wanted if name != ROW]
        row_count = 0
        for batch in stream.blocks(other_columns or list(stream.names[:1])):
            numbers = np.arange(row_count, row_count := row_count + batch.num_rows)
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns[ROW] = pc.cast(pa.array(numbers), pa.string())
            yield pa.RecordBatch.from_arrays([columns[name] for name in wanted], list(wanted))

    return replace(stream, names=(ROW, *stream.names), blocks=blocks)


def clear_words(stream: RowStream, words: Sequence[str]) -> RowStream:
    """Returns the same stream, in which text cells that are in ``words`` are empty. White space at
    the ends of a cell is ignored.
    """
    texts = [word.strip() for word in words]
    empty = pa.array([*texts, *(NUMBER + text for text in texts)], pa.string())

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for batch in stream.blocks(wanted):
            columns = [_clear_words(decode(column), empty) for column in batch.columns]
            yield pa.RecordBatch.from_arrays(columns, batch.schema.names)

    return replace(stream, blocks=blocks) if words else stream


def _clear_words(column: pa.Array, empty: pa.Array) -> pa.Array:
    types = pa.types
    if not (
        types.is_string(column.type)
        or types.is_large_string(column.type)
        or types.is_string_view(column.type)
    ):
        return column
    text = pc.cast(column, pa.large_string())
    is_empty = pc.is_in(pc.utf8_trim_whitespace(text), value_set=pc.cast(empty, pa.large_string()))
    return pc.if_else(is_empty, pa.scalar(None, pa.large_string()), text)
