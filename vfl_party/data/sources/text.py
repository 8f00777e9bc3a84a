"""Reads CSV files and similar text files in blocks of rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.packed import BROKEN
from vfl_party.data.sources.text_layout import (
    MAX_LINE,
    TextLayout,
    find_layout,
    iterate_lines,
    make_encoding_error,
    make_length_error,
    make_unreadable_error,
)
from vfl_party.data.sources.unchanged import require_unchanged, state_of
from vfl_party.data.stream import RowStream

# The maximum mean number of lines per row.
_MAX_LINES = 50
BLOCK_BYTES = 1 << 24


def open_text(settings: DataSettings) -> RowStream:
    """Opens a file of separated cells, whose first line names the columns. Raises InputError."""
    source, before = settings.source, state_of(settings.source)
    layout = find_layout(settings)
    places = {name: str(place) for place, name in enumerate(layout.names)}
    late_notes: list[str] = []
    named_columns = tuple(name for name in layout.names if name)

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        chosen = [places[name] for name in wanted]
        with require_unchanged(source, before):
            late_notes.clear()
            for batch in _iterate_batches(source, layout, chosen, late_notes):
                yield pa.RecordBatch.from_arrays(batch.columns, list(wanted))

    # Results are written like this file, and their separator must be one character.
    separator = "\t" if layout.several else layout.separator
    return RowStream(source, named_columns, True, blocks, separator, layout.notes, late_notes)


def _iterate_batches(
    source: str, layout: TextLayout, chosen: Sequence[str], notes: list[str]
) -> Iterator[pa.RecordBatch]:
    ragged_rows: list[Any] = []
    # Whether misplaced quotation marks have been checked.
    is_checked = False

    def record_row(row: Any) -> str:
        ragged_rows.append(row)
        return "error"

    columns = [str(place) for place in range(len(layout.names))]
    row_count = 0
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
                    invalid_row_handler=record_row,
                ),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(columns, pa.string()), include_columns=list(chosen)
                ),
            ) as reader,
        ):
            for batch in reader:
                row_count += batch.num_rows
                if data.zero:
                    raise _make_zero_byte_error(source, data.zero)
                # Checked before the rows are used, because a read with a limit of rows may end
                # here.
                if not (data.right or is_checked):
                    is_checked = True
                    _refuse_wrong_quotes(source, layout)
                yield batch
            if data.zero:
                raise _make_zero_byte_error(source, data.zero)
            if not (data.sound or is_checked):
                _refuse_wrong_quotes(source, layout)
            before = layout.skip + layout.header
            _check_lines(source, data.line_ends - before, row_count, notes)
    except (*BROKEN, UnicodeError) as error:
        if isinstance(error, pa.ArrowInvalid) and "Empty CSV" in str(error):
            return
        if ragged_rows:
            row = ragged_rows[0]
            where = (
                checks.rows(source, row.number - layout.header - layout.skip)
                if row.number
                else f"a row after {row_count:,}"
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
                f"a row after {row_count:,} has more than {BLOCK_BYTES >> 20} MiB. Write the file "
                "again, one row a line.",
            ) from None
        if "UTF8" in str(error) or isinstance(error, UnicodeError):
            raise make_encoding_error(source, layout.encoding) from None
        raise make_unreadable_error(source) from None


def _check_lines(source: str, line_ends: int, rows: int, notes: list[str]) -> None:
    """Adds a note about lines within quotation marks. Raises InputError if there are many such
    lines per row.
    """
    # Blank lines are counted too.
    extra_lines = line_ends - rows
    if extra_lines > max(100, _MAX_LINES * rows):
        raise checks.unreadable(
            source,
            f"has {line_ends:,} lines below the names of the columns but only {rows:,} rows: most "
            "lines are within quotation marks. Correct the quotation mark that opens there.",
        )
    if extra_lines > 100:
        notes.append(
            f"{extra_lines:,} lines are blank or within quotation marks, so they begin no row. "
            "Check the quotation marks."
        )


def _refuse_wrong_quotes(source: str, layout: TextLayout) -> None:
    """Raises InputError if a quotation mark is not closed, or if text follows a mark that closes a
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
                csv.reader(iterate_lines(source, text), delimiter=layout.separator, strict=True),
            )
            for _ in rows:
                start = rows.line_num
    except csv.Error as error:
        if "field larger" in str(error):
            raise make_length_error(source, start + 1) from None
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


def _make_zero_byte_error(source: str, line: int) -> Exception:
    """Returns the InputError for a line with a zero byte."""
    return checks.unreadable(
        source,
        f"line {line:,} holds a zero byte, as in a file that was not written to its end. Write the "
        "file again.",
    )


_READ = 1 << 20


class QuotedBytes(io.RawIOBase):
    """Reads the bytes of a file with line ends of one byte, and checks the positions of quotation
    marks.

    Each opening mark must be at the beginning of a cell, and each closing mark at the end of a
    cell. Otherwise a mark may be an ordinary character, as in ``5" pipe``.

    right: Whether the marks so far are at valid positions.
    sound: Whether the marks are valid and the last one is closed.
    line_ends: The number of line ends so far, including those within cells.
    zero: The line with the first zero byte; 0 if there is none.
    quotes: Whether quotation marks are special characters.
    """

    def __init__(self, file: Any, separator: str, *, lines: bool, quotes: bool = True) -> None:
        self._file, self._lines, self._quotes = file, lines, quotes
        self._is_cell_end = np.zeros(256, bool)
        self._is_cell_end[[ord(sign) for sign in (separator, "\n", "\r", '"')]] = True
        self._buffer, self._last_byte, self._is_open, self._is_at_end = b"", b"\n", False, False
        self.right, self.line_ends, self.zero = True, 0, 0

    @property
    def sound(self) -> bool:
        return self.right and not self._is_open

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns ``size`` bytes. It returns fewer bytes only at the end of the file, because Arrow
        takes fewer bytes for the end.
        """
        while not self._is_at_end and (size < 0 or len(self._buffer) < size):
            data = self._file.read(max(size, _READ))
            if data.endswith(b"\r"):
                data += self._file.read(1)
            self._is_at_end = not data
            if self._lines:
                data = data.replace(b"\r\n", b"\n")
            self._check_marks(data)
            self._buffer += data
        end = len(self._buffer) if size < 0 else size
        data, self._buffer = self._buffer[:end], self._buffer[end:]
        return data

    def _check_marks(self, data: bytes) -> None:
        if self._lines and not self.zero and b"\0" in data:
            self.zero = self.line_ends + data.count(b"\n", 0, data.index(b"\0")) + 1
        self.line_ends += data.count(b"\n") if self._lines else 0
        if not self._quotes:
            return
        places = (
            np.flatnonzero(np.frombuffer(data, np.uint8) == ord('"'))
            if b'"' in data
            else np.empty(0, np.int64)
        )
        around = np.frombuffer(self._last_byte + data + b"\n", np.uint8)
        opens = (np.arange(len(places)) % 2 == 0) ^ self._is_open
        neighbours = np.where(opens, around[places], around[places + 2])
        # If the last byte is a mark, its next byte is checked with the next chunk.
        at_end = ~opens & (places == len(data) - 1)
        if (
            self._is_open is False
            and self._last_byte == b'"'
            and data
            and not self._is_cell_end[data[0]]
        ):
            self.right = False
        self.right = self.right and bool((self._is_cell_end[neighbours] | at_end).all())
        self._is_open ^= len(places) % 2 == 1
        self._last_byte = data[-1:] or self._last_byte
