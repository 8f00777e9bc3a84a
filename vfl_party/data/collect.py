"""Collects a stream of rows block by block, in the order of the source: ids, labels, numbers,
categories.

Cells that a person wrote are read as ``number_formats`` finds. For other columns the type decides:
numbers, dates and times (as days) are numeric, text and booleans categories. In a column of numbers
an empty cell, NA and the like are missing; in a column of text only an empty cell is.
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
from vfl_party.data.choice import ColumnChoice, choose, index_notes, is_row_number
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.ids import texts_of
from vfl_party.data.reading import Reading
from vfl_party.data.row_arrays import Space
from vfl_party.data.stream import RowStream, clear_words, with_row_numbers, without_headers

# Rows and maximum cells that are converted at once.
BLOCK, MAX_CELLS = 1 << 16, 1 << 22


def collect(stream: RowStream, settings: DataSettings, with_label: bool) -> Rows:
    """Reads a table: the columns that the settings choose. Raises InputError."""
    stream = clear_words(without_headers(stream), settings.na)
    if not is_row_number(settings, stream.names):
        return replace(_collect(stream, settings, with_label), unsorted=stream.unsorted)
    rows = _collect(with_row_numbers(stream), settings, with_label)
    # As those of arrays, they sort in the rows' order.
    width, numbers = len(str(max(len(rows) - 1, 0))), rows.ids[0]
    padded = texts_of(numbers, Space.of(settings), lambda _, texts: pc.utf8_lpad(texts, width, "0"))
    return replace(rows, ids=[padded], numbered=True)


def _collect(stream: RowStream, settings: DataSettings, with_label: bool) -> Rows:
    chosen, space = (
        choose(stream.source, list(stream.names), settings, with_label),
        Space.of(settings),
    )
    notes = (*stream.notes, *index_notes(stream.names, settings))
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
            _blocks(stream, chosen, settings), notes
        )
    # Cells of columns that are written in another way after the sample.
    odd: dict[str, list[str]] = {}
    words: set[str] = set()
    while True:
        rows = _blocks(stream, chosen, settings)
        head = list(_first(rows, number_formats.SAMPLE))
        findings = _find(stream, chosen, settings, head, odd, words)
        reading = Reading(stream.source, chosen, settings, space, findings)
        result = reading.read(itertools.chain(head, rows), notes)
        if not reading.odd:
            return replace(
                result, notes=(*result.notes, *stream.late_notes), separator=stream.separator
            )
        words |= {name for name, cells in reading.odd.items() if name in odd or not cells}
        odd |= reading.odd


def columns_of(arrow: pa.Table, settings: DataSettings) -> Columns:
    """Returns the feature columns of a table in memory. Raises InputError."""
    chosen = ColumnChoice((), None, tuple(arrow.column_names))
    reading = Reading(settings.source, chosen, settings, Space.of(settings))
    for batch in arrow.to_batches():
        reading.add(batch)
    return reading.columns(arrow.schema)


def _blocks(
    stream: RowStream, chosen: ColumnChoice, settings: DataSettings
) -> Iterator[pa.RecordBatch]:
    """Yields blocks of the chosen columns, of at most ``BLOCK`` rows each and ``limit`` rows in
    all.
    """
    left, names = settings.first if settings.first is not None else 1 << 62, chosen.all_names()
    rows = min(BLOCK, max(1, MAX_CELLS // len(names)))
    for batch in stream.blocks(names):
        for start in range(0, min(batch.num_rows, left), rows):
            yield batch.slice(start, min(rows, left - start))
        left -= min(batch.num_rows, left)
        if left == 0:
            return


def _first(blocks: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields blocks until they have ``rows`` rows."""
    seen = 0
    while seen < rows and (batch := next(blocks, None)) is not None:
        seen += batch.num_rows
        yield batch


def _find(
    stream: RowStream,
    chosen: ColumnChoice,
    settings: DataSettings,
    head: Sequence[pa.RecordBatch],
    odd: Mapping[str, list[str]],
    words: set[str],
) -> number_formats.Findings:
    """Finds how the columns are written, from the first rows and the cells that did not fit in an
    earlier pass.
    """
    if not head:
        return number_formats.Findings({})
    wanted = [
        name
        for name in (chosen.label, *chosen.beside, *chosen.features)
        if name and name not in settings.categorical
    ]
    first = pa.Table.from_batches(head).slice(0, number_formats.SAMPLE).select(wanted)
    sample = {
        name: pa.concat_arrays(
            [*pc.cast(first[name], pa.string()).chunks, pa.array(odd.get(name, ()), pa.string())]
        )
        for name in wanted
    }
    marked = stream.separator is None
    commas = stream.separator == ","
    findings = number_formats.find(
        stream.source, sample, settings, commas=commas, marked=marked, words=words
    )
    readings = dict(findings.readings)
    for name in settings.numeric:
        if isinstance(readings.get(name), number_formats.Words):
            readings[name] = number_formats.Numbers(findings.style, marked=marked)
    return replace(findings, readings=readings)


def label_values(
    source: str, name: str, column: pa.Array, unlabelled: Unlabelled
) -> npt.NDArray[Any]:
    """Returns labels as float64 [N] or text [N].

    Raises InputError for other types, infinite labels and, unless ``unlabelled`` drops them,
    missing ones.
    """
    settings = DataSettings(source=source, label=name, unlabelled=unlabelled)
    reading = Reading(source, ColumnChoice((), name, ()), settings)
    reading.add(pa.record_batch({name: column}))
    values = reading.labels()
    assert values is not None  # noqa: S101 - it has a label
    return values


def split_values(source: str, name: str, column: pa.Array) -> npt.NDArray[np.object_]:
    """Returns the split of each row, text [N] of ``SPLITS``. Raises InputError for any other
    value.
    """
    reading = Reading(source, ColumnChoice((), None, (), name), DataSettings(source=source))
    reading.add(pa.record_batch({name: column}))
    values = reading.splits()
    assert values is not None  # noqa: S101 - it has a split
    return values
