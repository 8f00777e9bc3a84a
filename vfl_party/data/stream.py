"""Defines a table as a stream of blocks of rows, converts cells of any type to text, as in a CSV
file, and collects the categories of a column block by block.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import ROW
from vfl_party.data import checks

# Whole decimal numbers below this limit are written without a point.
_WHOLE = 1 << 63
# Floats below this limit represent all whole numbers exactly. Larger floats are written with an
# exponent.
_EXACT = 1 << 53


class MarkedError(ValueError):
    """A text begins with the character ``NUMBER``, which marks numbers."""

    def __init__(self) -> None:
        super().__init__(
            f"begins with the character U+{ord(NUMBER):04X}, which marks numbers here. Remove it."
        )


def write_cell(value: object) -> str | None:
    """Converts a cell to text; None if it is empty or NaN.

    Numbers are marked with ``NUMBER`` in front. Whole numbers have no point (3.0 becomes ``3``),
    and other numbers have as many digits as needed. Dates and times are written as ISO 8601. Raises
    TypeError if the type is not supported, MarkedError if a text begins with ``NUMBER``.
    """
    if value is None or isinstance(value, str):
        if value and value[0] == NUMBER:
            raise MarkedError
        return value or None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal):
        number = _write_number(value)
        return None if number is None else NUMBER + number
    # A datetime is also a date.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return _write_duration(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def _write_number(value: float | Decimal) -> str | None:
    if isinstance(value, Decimal):
        return _write_decimal(value)
    if isinstance(value, int):
        return str(value)
    whole = value.is_integer() and abs(value) < _EXACT
    return str(int(value)) if whole else None if math.isnan(value) else repr(value)


def _write_decimal(value: Decimal) -> str | None:
    if not value.is_finite():
        return None if value.is_nan() else repr(float(value))
    return str(int(value)) if abs(value) < _WHOLE and value == int(value) else f"{value:f}"


def _write_duration(value: datetime.timedelta) -> str:
    """Writes hours, minutes and seconds, as Excel shows a duration: ``30:15:00``."""
    sign, size = ("-", -value) if value < datetime.timedelta() else ("", value)
    minutes, seconds = divmod(size.days * 86_400 + size.seconds, 60)
    fraction = f".{size.microseconds:06d}" if size.microseconds else ""
    return f"{sign}{minutes // 60}:{minutes % 60:02d}:{seconds:02d}{fraction}"


# Texts that stand for missing values in a column of numbers or dates.
MISSING = pa.array(
    (
        "",
        "NA",
        "N/A",
        "n/a",
        "na",
        "#N/A",
        "NaN",
        "nan",
        "NAN",
        "null",
        "NULL",
        "None",
        "none",
        "?",
        "-",
    ),
    pa.string(),
)


def trim(text: pa.Array) -> pa.Array:
    """Removes white space from the ends of cells; missing cells become null."""
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=MISSING), pa.scalar(None, trimmed.type), trimmed)


def all_true(mask: pa.Array) -> bool:
    """Returns whether all non-null entries of a mask are true."""
    # The result is None if all cells are missing.
    return pc.all(mask).as_py() is not False


def mask_numbers(text: pa.Array) -> pa.Array:
    """Replaces cells that were numbers in the source with null."""
    return pc.if_else(
        pc.fill_null(pc.starts_with(text, NUMBER), False), pa.scalar(None, text.type), text
    )


def strip_mark(text: pa.Array) -> pa.Array:
    """Removes the mark ``NUMBER`` from cells that were numbers in the source."""
    return pc.replace_substring_regex(text, f"^{NUMBER}", "")


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


# The maximum number of categories of a column. A column with more is probably free text.
MAX_WORDS = 1 << 20


@dataclass
class Vocabulary:
    """The categories of one column, in the order in which they appear.

    ``buckets``: The number of buckets into which values are hashed. Each bucket is a category,
    named by its number. None if each value is a category.
    """

    source: str
    name: str
    places: dict[Any, int] = field(default_factory=dict)
    # The Arrow type of the values.
    kind: pa.DataType | None = None
    buckets: int | None = None
    seen: Digests = field(default_factory=lambda: Digests())

    def codes(self, column: pa.Array) -> npt.NDArray[np.int32]:
        """Converts cells to codes, int32 [B], -1 if missing. Raises InputError if there are too
        many categories.
        """
        encoded = pc.dictionary_encode(_category_values(column))
        values = encoded.dictionary.to_pylist()
        if self.buckets is None:
            self.kind = encoded.type.value_type
        else:
            digests_V = hash_values(values)
            self.kind, values = pa.int64(), (digests_V % np.uint64(self.buckets)).tolist()
            self.seen.add(digests_V)
        places = [self.places.setdefault(value, len(self.places)) for value in values]
        if len(self.places) > MAX_WORDS:
            raise checks.unusable(
                self.source,
                f"column {self.name!r} has more than {MAX_WORDS:,} categories. List it in "
                "data.drop, or in data.numeric if it holds numbers, or hash its values with "
                "data.categorical_buckets.",
            )
        local_B = pc.fill_null(encoded.indices, len(places)).to_numpy(zero_copy_only=False)
        codes_B: npt.NDArray[np.int32] = np.array([*places, -1], np.int32)[local_B]
        return codes_B

    def texts(self) -> tuple[str, ...]:
        """Returns the categories as text. Whole floats are written without '.0', so that 1 and 1.0
        are the same category.
        """
        values = pa.array(list(self.places), self.kind)
        if pa.types.is_floating(values.type):
            with contextlib.suppress(pa.ArrowInvalid):
                values = pc.cast(values, pa.int64())
        return tuple(pc.cast(values, pa.string()).to_pylist())

    def all_texts(self, codes_N: npt.NDArray[np.int32]) -> npt.NDArray[np.object_]:
        """Converts codes to text, object [N], None if missing. Equal texts share one object."""
        texts: npt.NDArray[np.object_] = np.array([*self.texts(), None], object)
        return texts[codes_N]

    def describe_shared(self) -> str:
        """Returns a note about the values that share a bucket; '' without buckets."""
        if self.buckets is None:
            return ""
        values = self.seen.all()
        used_buckets, value_counts = np.unique(values % np.uint64(self.buckets), return_counts=True)
        share = int(value_counts[value_counts > 1].sum())
        return (
            f"column {self.name!r}: {len(values):,} values are hashed into {self.buckets:,} "
            f"buckets, of which {len(used_buckets):,} are used, and {share:,} values share a "
            "bucket. To change this, set data.categorical_buckets."
        )


class Digests:
    """Collects the distinct digests of a column's values block by block, in eight bytes each."""

    def __init__(self) -> None:
        self._sorted_digests = np.empty(0, np.uint64)
        self._unsorted: list[npt.NDArray[np.uint64]] = []
        self._count = 0

    def add(self, digests_V: npt.NDArray[np.uint64]) -> None:
        """Adds digests, uint64 [V], which may have been added before."""
        self._unsorted.append(digests_V)
        self._count += len(digests_V)
        # The limit grows with the number of digests, so that they are sorted only a few times.
        if self._count > max(1 << 16, len(self._sorted_digests)):
            self.all()

    def all(self) -> npt.NDArray[np.uint64]:
        """Returns the distinct digests, ascending, uint64."""
        self._sorted_digests = np.unique(np.concatenate([self._sorted_digests, *self._unsorted]))
        self._unsorted, self._count = [], 0
        return self._sorted_digests


def hash_values(values: Sequence[Any]) -> npt.NDArray[np.uint64]:
    """Returns a digest of each value, uint64 [V]: the first 64 bits of BLAKE2b of its text. It is
    the same at every party and in every run.
    """
    texts = (
        str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        for value in values
    )
    data = b"".join(blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(data, ">u8").astype(np.uint64)


def decode(column: pa.Array) -> pa.Array:
    """Decodes a dictionary-encoded column to its values. Other columns are returned unchanged."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a column's values."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _category_values(column: pa.Array) -> pa.Array:
    """Returns the values of categories, null if missing. Floats stay floats, and other values
    become text.
    """
    column = decode(column)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        # Adding 0.0 converts -0.0 to 0.0.
        return pc.add(column, pa.scalar(0.0, column.type))
    text = pc.cast(column, pa.string())
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
