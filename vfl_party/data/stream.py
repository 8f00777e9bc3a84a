"""A table as it comes, in blocks of rows: what every reader of a table gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.vocabulary import decoded

# Before the text of a cell that was a number to its source, of Excel or a database: it has no decimal comma and no
# thousands sign, whatever the cells beside it have. The character is for private use: no text begins with it.
NUMBER = "\ue000"


@dataclass(frozen=True)
class Stream:
    """The rows of a table in blocks, so that a table may be larger than memory.

    Args:
        source: the table's name in sentences for people; it holds no password.
        names: of all columns, in the order of the table.
        as_written: whether cells are text as a person wrote it, whose type is to be found, as in a CSV file; if not,
            columns have the types that the table declares. Cells that were numbers begin with ``NUMBER``.
        blocks: called with the names of the wanted columns; reads the table from its beginning and yields blocks of
            these columns, in this order. It may be called several times. It raises InputError if the table cannot be
            read, or has changed since it was opened.
        separator: between the cells of a text file.
        notes: what the reader has guessed, a sentence each, with the key that decides it.
        found: likewise, what only reading to the end shows: there once the last block has come.
    """

    source: str
    names: tuple[str, ...]
    as_written: bool
    blocks: Callable[[Sequence[str]], Iterator[pa.RecordBatch]]
    separator: str | None = None
    notes: tuple[str, ...] = ()
    found: list[str] = field(default_factory=list)


def emptied(stream: Stream, words: Sequence[str]) -> Stream:
    """Returns the same table, in which a cell is empty if it is one of ``words``, without white space at its ends.

    Columns that hold no text stay as they are.
    """
    texts = [word.strip() for word in words]
    empty = pa.array([*texts, *(NUMBER + text for text in texts)], pa.string())

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for batch in stream.blocks(wanted):
            columns = [_emptied(decoded(column), empty) for column in batch.columns]
            yield pa.RecordBatch.from_arrays(columns, batch.schema.names)

    return replace(stream, blocks=blocks) if words else stream


def _emptied(column: pa.Array, empty: pa.Array) -> pa.Array:
    types = pa.types
    if not (types.is_string(column.type) or types.is_large_string(column.type) or types.is_string_view(column.type)):
        return column
    text = pc.cast(column, pa.large_string())
    found = pc.is_in(pc.utf8_trim_whitespace(text), value_set=pc.cast(empty, pa.large_string()))
    return pc.if_else(found, pa.scalar(None, pa.large_string()), text)
