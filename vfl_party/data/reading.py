"""Reads a stream of rows block by block, in the order of the source: ids, labels, numbers and
categories.

Cells of text are read in the formats that ``number_formats`` finds. For other columns the type
decides: numbers, dates and times (as days) are numeric, text and booleans are categories. In a
column of numbers, empty cells and texts such as NA are missing values. In a column of text, only
empty cells are missing values.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings, Unlabelled
from vfl_party.data import checks, number_formats
from vfl_party.data.choice import ColumnChoice, choose, describe_index, is_row_number
from vfl_party.data.ids import GrowingTexts, texts_of
from vfl_party.data.row_arrays import IN_MEMORY, GrowingMatrix, Space
from vfl_party.data.stream import (
    RowStream,
    Vocabulary,
    clear_words,
    decode,
    strip_mark,
    value_type,
    with_row_numbers,
    without_headers,
)
from vfl_party.data.table import Categories, Columns, Rows

# The maximum number of rows and of cells that are converted at once.
BLOCK, MAX_CELLS = 1 << 16, 1 << 22


def collect(stream: RowStream, settings: DataSettings, with_label: bool) -> Rows:
    """Reads the columns of a table that the settings choose. Raises InputError."""
    stream = clear_words(without_headers(stream), settings.na)
    if not is_row_number(settings, stream.names):
        return replace(_collect(stream, settings, with_label), unsorted=stream.unsorted)
    rows = _collect(with_row_numbers(stream), settings, with_label)
    # With leading zeros, row numbers sort as text in the order of the rows.
    width, numbers = len(str(max(len(rows) - 1, 0))), rows.ids[0]
    padded = texts_of(numbers, Space.of(settings), lambda _, texts: pc.utf8_lpad(texts, width, "0"))
    return replace(rows, ids=[padded], numbered=True)


def _collect(stream: RowStream, settings: DataSettings, with_label: bool) -> Rows:
    chosen, space = (
        choose(stream.source, list(stream.names), settings, with_label),
        Space.of(settings),
    )
    notes = (*stream.notes, *describe_index(stream.names, settings))
    if isinstance(settings.dates, dict):
        checks.require_names(stream.source, "dates", [*settings.dates], stream.names)
    if not stream.as_written:
        if settings.dates is not None:
            raise checks.unusable(
                stream.source,
                f"data.dates = {settings.dates!r} is for text cells, but the columns of this "
                "source have types. Remove data.dates, and store dates as dates.",
            )
        return Reading(stream.source, chosen, settings, space).read(
            _iterate_blocks(stream, chosen, settings), notes
        )
    # For each column, cells after the sample that do not fit the column's format.
    odd_cells: dict[str, list[str]] = {}
    word_columns: set[str] = set()
    while True:
        rows = _iterate_blocks(stream, chosen, settings)
        head = list(_take_first(rows, number_formats.SAMPLE))
        findings = _find_formats(stream, chosen, settings, head, odd_cells, word_columns)
        reading = Reading(stream.source, chosen, settings, space, findings)
        result = reading.read(itertools.chain(head, rows), notes)
        if not reading.odd:
            return replace(
                result, notes=(*result.notes, *stream.late_notes), separator=stream.separator
            )
        word_columns |= {
            name for name, cells in reading.odd.items() if name in odd_cells or not cells
        }
        odd_cells |= reading.odd


def read_columns(arrow: pa.Table, settings: DataSettings) -> Columns:
    """Returns the feature columns of an Arrow table. Raises InputError."""
    chosen = ColumnChoice((), None, tuple(arrow.column_names))
    reading = Reading(settings.source, chosen, settings, Space.of(settings))
    for batch in arrow.to_batches():
        reading.add(batch)
    return reading.columns(arrow.schema)


def _iterate_blocks(
    stream: RowStream, chosen: ColumnChoice, settings: DataSettings
) -> Iterator[pa.RecordBatch]:
    """Yields blocks of the chosen columns, with at most ``BLOCK`` rows each and ``settings.first``
    rows in total.
    """
    rows_left, names = settings.first if settings.first is not None else 1 << 62, chosen.all_names()
    rows = min(BLOCK, max(1, MAX_CELLS // len(names)))
    for batch in stream.blocks(names):
        for start in range(0, min(batch.num_rows, rows_left), rows):
            yield batch.slice(start, min(rows, rows_left - start))
        rows_left -= min(batch.num_rows, rows_left)
        if rows_left == 0:
            return


def _take_first(blocks: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields the first blocks, with at least ``rows`` rows in total if there are so many."""
    row_count = 0
    while row_count < rows and (batch := next(blocks, None)) is not None:
        row_count += batch.num_rows
        yield batch


def _find_formats(
    stream: RowStream,
    chosen: ColumnChoice,
    settings: DataSettings,
    head: Sequence[pa.RecordBatch],
    odd: Mapping[str, list[str]],
    words: set[str],
) -> number_formats.Findings:
    """Finds the formats of the columns from the first rows and from the cells that did not fit in
    an earlier pass.
    """
    if not head:
        return number_formats.Findings({})
    wanted = [
        name
        for name in (chosen.label, *chosen.beside, *chosen.features)
        if name and name not in settings.categorical
    ]
    first_rows = pa.Table.from_batches(head).slice(0, number_formats.SAMPLE).select(wanted)
    sample = {
        name: pa.concat_arrays(
            [
                *pc.cast(first_rows[name], pa.string()).chunks,
                pa.array(odd.get(name, ()), pa.string()),
            ]
        )
        for name in wanted
    }
    marked = stream.separator is None
    commas = stream.separator == ","
    findings = number_formats.find_formats(
        stream.source, sample, settings, commas=commas, marked=marked, words=words
    )
    readings = dict(findings.readings)
    for name in settings.numeric:
        if isinstance(readings.get(name), number_formats.Words):
            readings[name] = number_formats.Numbers(findings.style, marked=marked)
    return replace(findings, readings=readings)


def read_labels(
    source: str, name: str, column: pa.Array, unlabelled: Unlabelled
) -> npt.NDArray[Any]:
    """Converts a label column to float64 [N] or text [N].

    Raises InputError for other types, infinite labels and missing labels. Missing labels are
    allowed if ``unlabelled`` drops them.
    """
    settings = DataSettings(source=source, label=name, unlabelled=unlabelled)
    reading = Reading(source, ColumnChoice((), name, ()), settings)
    reading.add(pa.record_batch({name: column}))
    values = reading.labels()
    assert values is not None  # noqa: S101 - it has a label
    return values


def read_splits(source: str, name: str, column: pa.Array) -> npt.NDArray[np.object_]:
    """Converts a column of splits to text [N]. Raises InputError for a value that is not in
    ``SPLITS``.
    """
    reading = Reading(source, ColumnChoice((), None, (), name), DataSettings(source=source))
    reading.add(pa.record_batch({name: column}))
    values = reading.splits()
    assert values is not None  # noqa: S101 - it has a split
    return values


log = logging.getLogger(__name__)


# The kind of a numeric column that holds dates, as days.
DATE = "date"


# The allowed values in the column that ``data.split`` names.
SPLITS = ("train", "validation", "test")


# Seconds between log lines about the number of rows read.
LOG_EVERY_S = 10.0


# The maximum number of cells to keep of a column whose later cells do not fit its format.
MAX_ODD = 1_000


class Reading:
    """One pass over a stream of rows. ``findings``: The formats of its cells of text; None if its
    columns have types.

    ``odd``: For each column, the cells that do not fit the format of the first cells. If it is not
    empty, the result must be discarded.
    """

    def __init__(
        self,
        source: str,
        chosen: ColumnChoice,
        settings: DataSettings,
        space: Space = IN_MEMORY,
        findings: number_formats.Findings | None = None,
    ) -> None:
        self.odd: dict[str, list[str]] = {}
        self._source, self._chosen, self._settings, self._space, self._findings = (
            source,
            chosen,
            settings,
            space,
            findings,
        )
        self._features = frozenset(chosen.features)
        self._rows = 0
        self._ids = [GrowingTexts(space) for _ in chosen.id]
        self._words: dict[str, Vocabulary] = {}
        # The values of label and other role columns, added with the first block.
        self._values: dict[str, GrowingMatrix] = {}
        self._split: list[npt.NDArray[np.int32]] = []
        # The names of the numeric and the other features, set with the first block.
        self._numeric: tuple[str, ...] | None = None
        self._categorical: tuple[str, ...] = ()
        self._numbers: GrowingMatrix | None = None
        self._codes: GrowingMatrix | None = None

    def read(self, blocks: Iterator[pa.RecordBatch], notes: tuple[str, ...] = ()) -> Rows:
        """Reads all blocks, and returns their rows. Raises InputError."""
        schema, logged_s = None, time.monotonic()
        for batch in blocks:
            schema = batch.schema
            self.add(batch)
            if time.monotonic() - logged_s > LOG_EVERY_S:
                log.info(
                    "%s: %s rows are read",
                    self._source,
                    f"{self._rows:,}",
                    extra={"event": "reading"},
                )
                logged_s = time.monotonic()
        checks.require_rows(self._source, self._rows)
        if self._findings is not None and self._findings.points is not None and not self.odd:
            self._findings.points.decide()
        assert schema is not None  # noqa: S101 - there are rows
        all_notes = [*notes, *(self._findings.notes if self._findings is not None else ())]
        all_notes += filter(
            None, (vocabulary.describe_shared() for vocabulary in self._words.values())
        )
        types = tuple(value_type(schema.field(name).type) for name in self._chosen.id)
        return Rows(
            [ids.finish() for ids in self._ids],
            self.labels(),
            self.columns(schema),
            self.splits(),
            tuple(all_notes),
            types,
            beside={name: self._finish_values(name) for name in self._chosen.beside},
        )

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds a block of rows. Raises InputError."""
        for ids, name in zip(self._ids, self._chosen.id, strict=True):
            ids.append(id_texts(self._source, name, self._strip_marks(batch.column(name))))
        label = () if self._chosen.label is None else (self._chosen.label,)
        for name in (*label, *self._chosen.beside):
            values = self._read_labels(name, batch.column(name))
            if name not in self._values:
                self._values[name] = self._space.share().growing((), values.dtype)
            self._values[name].append(values)
        if self._chosen.split is not None:
            self._split.append(
                self._read_splits(self._chosen.split, batch.column(self._chosen.split))
            )
        numeric = self._start_columns(batch.schema)
        block_FB = np.empty((len(numeric), batch.num_rows), np.float32)
        # Values beyond float32 become infinite, and infinite values raise InputError later.
        with np.errstate(over="ignore"):
            for row_B, name in zip(block_FB, numeric, strict=True):
                row_B[:] = self._read_numbers(name, batch.column(name))
        categorical = self._categorical
        codes_BK = np.empty((batch.num_rows, len(categorical)), np.int32)
        for k, name in enumerate(categorical):
            codes_BK[:, k] = self._encode_words(name, batch.column(name))
        assert self._numbers is not None and self._codes is not None  # noqa: S101, PT018 - begun above
        self._numbers.append(np.ascontiguousarray(block_FB.T))
        self._codes.append(codes_BK)
        self._rows += batch.num_rows

    def columns(self, schema: pa.Schema) -> Columns:
        """Returns the feature columns of all rows."""
        numeric = self._start_columns(schema)
        categorical = self._categorical
        assert self._numbers is not None and self._codes is not None  # noqa: S101, PT018 - begun above
        texts = tuple(
            self._words[name].texts() if name in self._words else () for name in categorical
        )
        words = Categories(self._codes.finish(), texts)
        style = (
            None
            if self._findings is None
            else (self._findings.style.decimal, self._findings.style.thousands)
        )
        return Columns(
            self._numbers.finish(),
            numeric,
            words,
            categorical,
            self._find_kinds(numeric, schema),
            style,
        )

    def _find_kinds(self, numeric: Sequence[str], schema: pa.Schema) -> dict[str, str]:
        """Returns the kind of each numeric column of dates or of numbers with a sign."""
        kinds = {}
        for name in numeric:
            reading = None if self._findings is None else self._findings.readings[name]
            if isinstance(reading, number_formats.Dates) or (
                reading is None and is_time(schema.field(name).type)
            ):
                kinds[name] = DATE
            elif isinstance(reading, number_formats.Numbers) and reading.sign:
                kinds[name] = reading.sign
        return kinds

    def _start_columns(self, schema: pa.Schema) -> tuple[str, ...]:
        """Returns the names of the numeric features, which the first block determines. Raises
        InputError.
        """
        if self._numeric is None:
            features = self._chosen.features
            self._numeric = tuple(
                name for name in features if self._is_numeric(name, schema.field(name).type)
            )
            numeric_names = set(self._numeric)
            self._refuse_buckets(self._numeric)
            self._categorical = tuple(name for name in features if name not in numeric_names)
            self._numbers = self._space.growing(len(self._numeric), np.float32)
            self._codes = self._space.growing(len(features) - len(self._numeric), np.int32)
        return self._numeric

    def _is_numeric(self, name: str, kind: pa.DataType) -> bool:
        if name in self._settings.categorical:
            return False
        if self._findings is not None:
            return not isinstance(self._findings.readings[name], number_formats.Words)
        if name in self._settings.numeric or is_number(kind) or is_time(kind):
            return True
        if is_text(kind):
            return False
        raise checks.unusable(
            self._source,
            f"column {name!r} must hold numbers or text (got {kind}). List it in data.categorical "
            "or data.drop.",
        )

    def _refuse_buckets(self, numeric: Sequence[str]) -> None:
        """Raises InputError if ``data.categorical_buckets`` names a numeric column."""
        buckets = self._settings.categorical_buckets
        for name in numeric:
            if isinstance(buckets, dict) and name in buckets:
                raise checks.unusable(
                    self._source,
                    f"column {name!r} is in data.categorical_buckets but holds numbers. List it in "
                    "data.categorical too.",
                )

    def _read_numbers(self, name: str, column: pa.Array) -> npt.NDArray[np.float64]:
        if self._findings is not None:
            return self._read_cells(name, column)
        column = decode(column)
        if is_time(column.type):
            return to_floats(number_formats.to_days(column))
        if is_number(column.type):
            return to_floats(column)
        if pa.types.is_boolean(column.type):
            return to_floats(pc.cast(column, pa.int8()))
        if not is_text(column.type):
            raise checks.unusable(
                self._source,
                f"column {name!r} held numbers in training (got {column.type}). Correct the column."
                if self._settings.as_trained
                else f"column {name!r} is in data.numeric but holds {column.type}. Remove it from "
                "data.numeric.",
            )
        settings = self._settings
        reading = number_formats.Numbers(
            number_formats.Style(settings.decimal or ".", settings.thousands or "")
        )
        numbers = reading.read(pc.cast(column, pa.string()))
        return (
            to_floats(numbers)
            if numbers is not None
            else self._raise_not_number(name, column, reading)
        )

    def _read_cells(self, name: str, column: pa.Array) -> npt.NDArray[np.float64]:
        """Reads cells in the format of the column. Collects cells that do not fit, so that the
        column can be read again in another format.
        """
        assert self._findings is not None  # noqa: S101 - of a stream of text
        reading = self._findings.readings[name]
        assert not isinstance(reading, number_formats.Words)  # noqa: S101 - of a column of numbers
        column = pc.cast(column, pa.string())
        values = reading.read(column)
        if values is not None:
            if self._findings.points is not None and isinstance(reading, number_formats.Numbers):
                self._findings.points.examine(name, column, reading)
            return to_floats(values)
        if name in self._settings.numeric:
            return self._raise_not_number(name, column, reading)
        if (
            isinstance(reading, number_formats.Dates)
            and reading.form
            and reading.form == self._settings.date_form(name)
        ):
            raise number_formats.make_mixed_error(self._source, name, reading.form)
        odd_cells = self.odd.setdefault(name, [])
        if isinstance(reading, number_formats.Numbers) and len(odd_cells) < MAX_ODD:
            odd_cells += (
                number_formats.filter_unlike(column, reading)
                .slice(0, MAX_ODD - len(odd_cells))
                .to_pylist()
            )
        return np.full(len(column), np.nan)

    def _raise_not_number(
        self, name: str, column: pa.Array, reading: Any
    ) -> npt.NDArray[np.float64]:
        where = checks.rows(self._source, self._rows + _find_first_unread(column, reading) + 1)
        raise checks.unusable(
            self._source,
            f"column {name!r} held numbers in training and holds text in {where}. Correct the "
            "value, or list it in data.na if it stands for an empty cell."
            if self._settings.as_trained
            else f"column {name!r} is in data.numeric and holds text in {where}. Correct the "
            "value, list it in data.na if it stands for an empty cell, or remove the column from "
            "data.numeric.",
        )

    def _strip_marks(self, column: pa.Array) -> pa.Array:
        """Removes the marks of numbers from a column of text cells. Other columns are returned
        unchanged.
        """
        if self._findings is None or not self._findings.marked:
            return column
        return strip_mark(pc.cast(column, pa.string()))

    def _encode_words(self, name: str, column: pa.Array) -> npt.NDArray[np.int32]:
        try:
            if name not in self._words:
                self._words[name] = self._make_vocabulary(name)
            return self._words[name].codes(self._strip_marks(column))
        except pa.ArrowException:
            raise checks.unusable(
                self._source,
                f"column {name!r} is read as categories, and its values cannot be written as text "
                f"(got {column.type}). Drop the column.",
            ) from None

    def _make_vocabulary(self, name: str) -> Vocabulary:
        is_feature = name in self._features
        buckets = self._settings.buckets(name) if is_feature else None
        return Vocabulary(self._source, name, buckets=buckets)

    def _read_labels(self, name: str, column: pa.Array) -> npt.NDArray[Any]:
        column = decode(column)
        if self._findings is not None and name not in self._settings.categorical:
            reading = self._findings.readings[name]
            if isinstance(reading, number_formats.Numbers):
                return self._read_cells(name, column)
        elif self._findings is None and is_number(column.type):
            return to_floats(column)
        if not is_text(column.type):
            role = self._get_role(name)
            raise checks.unusable(
                self._source,
                f"{role} column {name!r} must hold numbers or text (got {column.type}). Convert "
                "it.",
            )
        return self._encode_words(name, column)

    def labels(self) -> npt.NDArray[Any] | None:
        """Returns the labels of all rows, [N] float64 or text; None without a label column. Raises
        InputError.
        """
        name = self._chosen.label
        return None if name is None else self._finish_values(name)

    def _finish_values(self, name: str) -> npt.NDArray[Any]:
        """Returns the label or role column of all rows. Raises InputError if a value is missing,
        unless rows without a label are dropped.
        """
        values = self._values[name].finish()
        if name in self._words:
            values = self._words[name].all_texts(values)
            missing_N = checks.mask_missing_text(values)
        else:
            checks.require_finite(self._source, values[:, None], [name])
            missing_N = np.isnan(values)
        left_out = name == self._settings.label and self._settings.unlabelled == "drop"
        if name not in self.odd and not left_out:
            role = self._get_role(name)
            checks.require_present(
                self._source,
                f"{role} column {name!r}",
                missing_N,
                f'Leave out the rows without a {role}, or set data.unlabelled to "drop".'
                if name == self._settings.label
                else f"Leave out the rows without a {role}.",
            )
        return values

    def _get_role(self, name: str) -> str:
        return self._settings.role_beside(name)

    def _read_splits(self, name: str, column: pa.Array) -> npt.NDArray[np.int32]:
        column = decode(self._strip_marks(column))
        text = (
            pc.cast(column, pa.string())
            if is_text(column.type)
            else pa.nulls(len(column), pa.string())
        )
        codes = (
            pc.index_in(text, value_set=pa.array(SPLITS))
            .fill_null(-1)
            .to_numpy(zero_copy_only=False)
        )
        if (codes < 0).any():
            where = checks.rows(self._source, self._rows + int((codes < 0).argmax()) + 1)
            raise checks.unusable(
                self._source,
                f"column {name!r}, which data.split names, must hold {', '.join(SPLITS)} (got "
                f"something else in {where}). Correct it.",
            )
        result: npt.NDArray[np.int32] = codes
        return result

    def splits(self) -> npt.NDArray[np.object_] | None:
        """Returns the split of each row, [N] text; None without a split column."""
        return (
            np.array(SPLITS, object)[np.concatenate(self._split)]
            if self._chosen.split is not None
            else None
        )


def id_texts(source: str, name: str, column: pa.Array) -> pa.Array:
    """Converts ids to text, null if missing. Raises InputError unless they are text or whole
    numbers.
    """
    column = decode(column)
    if pa.types.is_floating(column.type) and column.null_count:
        # pandas stores whole numbers as floats if some are missing.
        is_whole = pc.all(pc.equal(column, pc.floor(column)), min_count=0).as_py()
        if is_whole and pc.all(pc.less(pc.abs(column), 2.0**53), min_count=0).as_py():
            column = pc.cast(column, pa.int64())
    if not (
        pa.types.is_integer(column.type)
        or pa.types.is_null(column.type)
        or (is_text(column.type) and not pa.types.is_boolean(column.type))
        # Spark and Oracle store whole numbers as decimal numbers with scale 0.
        or (pa.types.is_decimal(column.type) and column.type.scale == 0)
    ):
        raise checks.unusable(
            source,
            f"id column {name!r} must hold text or whole numbers (got {column.type}). Choose "
            "another column, or convert it.",
        )
    return pc.cast(column, pa.large_string())


def _find_first_unread(column: pa.Array, reading: Any) -> int:
    """Returns the position of the first cell that ``reading`` cannot read, found by bisection."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (low, middle)
            if reading.read(column.slice(low, middle - low)) is None
            else (middle, high)
        )
    return low


def is_number(kind: pa.DataType) -> bool:
    """Returns whether a column holds numbers. A column with only nulls counts as numbers."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def is_time(kind: pa.DataType) -> bool:
    """Returns whether a column holds dates, with or without a time."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def is_text(kind: pa.DataType) -> bool:
    """Returns whether a column holds text or booleans, including dictionary-encoded text."""
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_string_view(kind)
        or types.is_boolean(kind)
        or (types.is_dictionary(kind) and is_text(kind.value_type))
    )


def to_floats(column: pa.Array) -> npt.NDArray[np.float64]:
    """Converts a column to float64 [B], with NaN for null."""
    values: npt.NDArray[np.float64] = pc.cast(column, pa.float64(), safe=False).to_numpy(
        zero_copy_only=False
    )
    return values
