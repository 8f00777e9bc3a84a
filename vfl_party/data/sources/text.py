"""Reads CSV files and similar ones in blocks of rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.packed import BROKEN
from vfl_party.data.sources.quotes import QuotedBytes
from vfl_party.data.sources.text_layout import (
    MAX_LINE,
    TextLayout,
    find_layout,
    lines_of,
    not_in,
    not_text,
    too_long,
)
from vfl_party.data.sources.unchanged import require_unchanged, state_of
from vfl_party.data.stream import RowStream

# Maximum lines of a row, on average.
_MAX_LINES = 50
BLOCK_BYTES = 1 << 24


def open_text(settings: DataSettings) -> RowStream:
    """Opens a file of separated cells: the first line names the columns. Raises InputError."""
    source, before = settings.source, state_of(settings.source)
    layout = find_layout(settings)
    places = {name: str(place) for place, name in enumerate(layout.names)}
    late_notes: list[str] = []
    named = tuple(name for name in layout.names if name)

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        chosen = [places[name] for name in wanted]
        with require_unchanged(source, before):
            late_notes.clear()
            for batch in _text_blocks(source, layout, chosen, late_notes):
                yield pa.RecordBatch.from_arrays(batch.columns, list(wanted))

    # A file written like this one needs a separator of one character.
    separator = "\t" if layout.several else layout.separator
    return RowStream(source, named, True, blocks, separator, layout.notes, late_notes)


def _text_blocks(
    source: str, layout: TextLayout, chosen: Sequence[str], notes: list[str]
) -> Iterator[pa.RecordBatch]:
    ragged: list[Any] = []
    # Whether misplaced quotation marks have been checked.
    looked = False

    def note(row: Any) -> str:
        ragged.append(row)
        return "error"

    columns = [str(place) for place in range(len(layout.names))]
    seen = 0
    try:
        with (
            layout.open(source) as file,
            QuotedBytes(
                file,
                layout.separator,
                lines=not layout.encoding.startswith(("utf-16", "utf-32")),
                quotes=not layout.several,
            ) as data,
            arrow_csv.open_csv(
                data,
                arrow_csv.ReadOptions(
                    use_threads=False,
                    block_size=BLOCK_BYTES,
                    skip_rows=layout.skip,
                    column_names=columns,
                    skip_rows_after_names=int(layout.header),
                    encoding=layout.encoding,
                ),
                arrow_csv.ParseOptions(
                    delimiter=layout.separator,
                    quote_char=False if layout.several else '"',
                    newlines_in_values=not layout.several,
                    invalid_row_handler=note,
                ),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(columns, pa.string()), include_columns=list(chosen)
                ),
            ) as reader,
        ):
            for batch in reader:
                seen += batch.num_rows
                if data.zero:
                    raise _zero_byte(source, data.zero)
                # Checked before the rows are used: a limited read ends here.
                if not (data.right or looked):
                    looked = True
                    _refuse_wrong_quotes(source, layout)
                yield batch
            if data.zero:
                raise _zero_byte(source, data.zero)
            if not (data.sound or looked):
                _refuse_wrong_quotes(source, layout)
            before = layout.skip + layout.header
            _look_at_lines(source, data.line_ends - before, seen, notes)
    except (*BROKEN, UnicodeError) as error:
        if isinstance(error, pa.ArrowInvalid) and "Empty CSV" in str(error):
            return
        if ragged:
            row = ragged[0]
            where = (
                checks.rows(source, row.number - layout.header - layout.skip)
                if row.number
                else f"a row after {seen:,}"
            )
            names = "the header names" if layout.header else "data.names has"
            raise checks.unreadable(
                source,
                f"{where} must have {row.expected_columns} cells, as {names} columns (got "
                f"{row.actual_columns}). Correct it, or set data.separator or data.skip_lines.",
            ) from None
        if "straddling" in str(error):
            raise checks.unreadable(
                source,
                f"a row after {seen:,} has more than {BLOCK_BYTES >> 20} MiB. Write the file "
                "again, one row a line.",
            ) from None
        if "UTF8" in str(error) or isinstance(error, UnicodeError):
            raise not_in(source, layout.encoding) from None
        raise not_text(source) from None


def _look_at_lines(source: str, line_ends: int, rows: int, notes: list[str]) -> None:
    """Notes lines within quotation marks. Raises InputError if there are many for each row."""
    # Blank lines count too.
    within = line_ends - rows
    if within > max(100, _MAX_LINES * rows):
        raise checks.unreadable(
            source,
            f"has {line_ends:,} lines below the names of the columns but only {rows:,} rows: most "
            "lines are within quotation marks. Correct the quotation mark that opens there.",
        )
    if within > 100:
        notes.append(
            f"{within:,} lines are blank or within quotation marks, so they begin no row. "
            "Check the quotation marks."
        )


def _refuse_wrong_quotes(source: str, layout: TextLayout) -> None:
    """Raises InputError if a quotation mark is not closed, or if text follows one that closes a
    cell.
    """
    before = csv.field_size_limit(MAX_LINE)
    try:
        with (
            layout.open(source) as file,
            io.TextIOWrapper(file, encoding=layout.encoding, newline="") as text,
        ):
            start, rows = (
                0,
                csv.reader(lines_of(source, text), delimiter=layout.separator, strict=True),
            )
            for _ in rows:
                start = rows.line_num
    except csv.Error as error:
        if "field larger" in str(error):
            raise too_long(source, start + 1) from None
        if "unexpected end" in str(error):
            raise checks.unreadable(
                source,
                f"line {start + 1} opens a quotation mark that is never closed. Correct it: write "
                'a quotation mark within a cell twice ("").',
            ) from None
        raise checks.unreadable(
            source,
            f"in line {start + 1} text follows a quotation mark that closes a cell. Correct it: "
            'write a quotation mark within a cell twice ("").',
        ) from None
    finally:
        csv.field_size_limit(before)


def _zero_byte(source: str, line: int) -> Exception:
    """Returns the InputError of a line with a zero byte."""
    return checks.unreadable(
        source,
        f"line {line:,} holds a zero byte, as in a file that was not written to its end. Write the "
        "file again.",
    )
