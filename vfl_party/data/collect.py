"""Reads a stream of rows block by block, in the order of the source: ids, labels, numbers and
categories.

Cells of text are read in the formats that ``number_formats`` finds. For other columns the type
decides: numbers, dates and times (as days) are numeric, text and booleans are categories. In a
column of numbers, empty cells and texts such as NA are missing values. In a column of text, only
empty cells are missing values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings, Unlabelled
from vfl_party.data import checks
from vfl_party.data.cells import number_formats
from vfl_party.data.choice import ColumnChoice, choose, describe_index, is_row_number
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.ids import texts_of
from vfl_party.data.reading import Reading
from vfl_party.data.row_arrays import Space
from vfl_party.data.stream import RowStream, clear_words, with_row_numbers, without_headers

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
