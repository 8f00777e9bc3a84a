"""A table in blocks of rows: the result of every reader of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import ROW
from vfl_party.data import checks
from vfl_party.data.vocabulary import decode

# Before the text of a cell that was a number to its source, of Excel or a database: it has no
# decimal comma and no thousands sign, whatever its other cells have. The character is for
# private use: no text begins with it.
NUMBER = "\ue000"


@dataclass(frozen=True)
class RowStream:
    """The rows of a table in blocks, so that a table may be larger than memory.

    Args:
        source: the table's name in errors, without a password.
        names: of all columns, in the order of the table.
        as_written: whether cells are text as a person wrote it, whose type must be found, as in a
            CSV file; otherwise columns have the types that the table declares. Cells that were
            numbers begin with ``NUMBER``.
        blocks: reads the wanted columns from the beginning of the table, in blocks. It may be
            called several times. It raises InputError if the table cannot be read, or has changed
            since it was opened.
        separator: between the cells of a text file.
        notes: guesses of the reader, with the key that decides each.
        late_notes: more notes, which are known once the last block has been read.
        ordered: whether the rows come in the same order each time.
        unsorted: which rows are the first ones of unordered rows: a note for settings that take
            some rows by position.
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
    """Returns the same table, which raises InputError if a row repeats the names of the columns.

    Concatenated files have such rows, which turn all columns of numbers into words.
    """

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        seen = 0
        for batch in stream.blocks(wanted):
            place = _header_in(batch)
            if place >= 0:
                raise checks.unusable(
                    stream.source,
                    f"{checks.rows(stream.source, seen + place + 1)} repeats the names of the "
                    "columns, as when files are concatenated. Delete the row.",
                )
            yield batch
            seen += batch.num_rows

    return replace(stream, blocks=blocks) if stream.as_written else stream


def _header_in(batch: pa.RecordBatch) -> int:
    """Returns the position of the first row whose cells are the names of their columns; -1 if there
    is none.
    """
    # A word may well be called as its column is.
    if batch.num_columns < 2:
        return -1
    rows = pa.array(np.arange(batch.num_rows))
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        same = pc.equal(pc.utf8_trim_whitespace(column.take(rows)), name)
        rows = rows.filter(pc.fill_null(same, False))
        if not len(rows):
            return -1
    return int(rows[0].as_py())


def with_row_numbers(stream: RowStream) -> RowStream:
    """Returns the same table with a first column ``row``: the row number from 0, as text.

    Raises InputError if the rows have no order.
    """
    if not stream.ordered:
        raise checks.unusable(
            stream.source,
            f'data.id = "{ROW}" is the row number, but the rows of a database have no order. Name '
            "an id column.",
        )

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        # Some column must be read, or a block would not know how many rows it has.
        own = [name for name in wanted if name != ROW]
        seen = 0
        for batch in stream.blocks(own or list(stream.names[:1])):
            numbers = np.arange(seen, seen := seen + batch.num_rows)
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns[ROW] = pc.cast(pa.array(numbers), pa.string())
            yield pa.RecordBatch.from_arrays([columns[name] for name in wanted], list(wanted))

    return replace(stream, names=(ROW, *stream.names), blocks=blocks)


def clear_words(stream: RowStream, words: Sequence[str]) -> RowStream:
    """Returns the same table with empty cells for those of ``words``, ignoring white space at their
    ends.

    Columns without text are unchanged.
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
