"""Reads text files in blocks of rows: CSV and similar files, libsvm and svmlight files.

A line of libsvm is ``LABEL INDEX:VALUE INDEX:VALUE …``. A value that a line omits is 0. The indices
of a line must ascend. Text after ``#`` is a comment.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as arrow_csv

from vfl_common.config.data import MAX_COLUMNS, DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.files import BROKEN, open_bytes, require_unchanged, state_of
from vfl_party.data.sources.text_layout import (
    MAX_LINE,
    TextLayout,
    find_layout,
    iterate_lines,
    make_encoding_error,
    make_length_error,
    make_names,
    make_unreadable_error,
)
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


LABEL = "label"


# A query id that is not in a comment.
_QUERY = re.compile(rb"(?m)^[^#\n]*qid:")


# The number of bytes that are parsed at once, and the maximum number of cells in a block.
_READ_AT_ONCE, _MAX_CELLS = 1 << 22, 1 << 22


def open_svmlight(settings: DataSettings) -> RowStream:
    """Opens a file. Its columns are ``label``, then ``f1``, ``f2`` and so on, named by their
    indices.

    If a line has the index 0, the features begin with ``f0``. Without ``data.names`` the file is
    read once more to find the largest index. Raises InputError.
    """
    source, before = settings.source, state_of(settings.source)
    if settings.names is None:
        first, last = _find_index_range(source)
        names = tuple(f"f{at}" for at in range(first, last + 1))
    else:
        first, names = 1, make_names(settings.names)

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        positions = {name: at for at, name in enumerate(names)}
        columns = np.array([positions[name] for name in wanted if name != LABEL], np.int64)
        with require_unchanged(source, before):
            for number, labels, cells in _parse(source):
                if (
                    cells.nnz
                    and not first <= cells.indices.min() <= cells.indices.max() < first + len(names)
                ):
                    raise _make_index_error(source, number, cells, first, len(names))
                yield from _make_batches(labels, cells, first, columns, wanted)

    return RowStream(source, (LABEL, *names), False, blocks)


def _find_index_range(source: str) -> tuple[int, int]:
    """Returns the first and the last index of the columns. Raises InputError."""
    first, last = 1, 0
    for _, _, cells in _parse(source):
        if cells.nnz:
            first, last = min(first, int(cells.indices.min())), max(last, int(cells.indices.max()))
        if last > MAX_COLUMNS:
            raise checks.unusable(
                source,
                f"must have at most {MAX_COLUMNS:,} columns (got the index {last:,}). Write fewer "
                "columns.",
            )
    return first, last


def _parse(source: str) -> Iterator[tuple[int, npt.NDArray[np.float64], Any]]:
    """Yields blocks of rows: the number of the first line, the labels, float64 [B], and the cells,
    a sparse matrix [B, F].
    """
    from sklearn.datasets import load_svmlight_file

    number = 1
    for lines in _read_lines(source):
        try:
            cells, labels = load_svmlight_file(io.BytesIO(lines), zero_based=True)
        except (ValueError, OverflowError):
            raise _make_line_error(source, lines, number) from None
        if _QUERY.search(lines):
            raise checks.unusable(
                source,
                "holds qid, the queries of a ranking, which are not read from libsvm files. Remove "
                "them, or write a CSV file with a column for data.group.",
            )
        if not np.isfinite(labels).all():
            raise _make_line_error(source, lines, number)
        yield number, labels, cells
        number += lines.count(b"\n")


def _read_lines(source: str) -> Iterator[bytes]:
    """Yields the bytes of a file in chunks of complete lines. Raises InputError."""
    tail, number = b"", 1
    try:
        with open_bytes(source) as file:
            while data := file.read(_READ_AT_ONCE):
                data = tail + data
                end = data.rfind(b"\n") + 1
                tail = data[end:]
                if len(tail) > MAX_LINE:
                    raise make_length_error(source, number + data.count(b"\n"))
                if end:
                    yield data[:end]
                    number += data.count(b"\n")
        if tail:
            yield tail
    except BROKEN:
        raise checks.unreadable(
            source, "is not a readable libsvm file. Write the file again."
        ) from None


def _make_line_error(source: str, lines: bytes, number: int) -> Exception:
    """Returns the InputError for the first invalid line."""
    from sklearn.datasets import load_svmlight_file

    at = number
    for line in lines.split(b"\n"):
        try:
            _, labels = load_svmlight_file(io.BytesIO(line), zero_based=True)
        except (ValueError, OverflowError):
            break
        if not np.isfinite(labels).all():
            break
        at += 1
    return checks.unreadable(
        source,
        f"line {at:,} is not LABEL INDEX:VALUE INDEX:VALUE with ascending indices. Correct it.",
    )


def _make_index_error(source: str, number: int, cells: Any, first: int, count: int) -> Exception:
    """Returns the InputError for an index without a column."""
    is_wrong = (cells.indices < first) | (cells.indices >= first + count)
    index = int(cells.indices[is_wrong.argmax()])
    return checks.unusable(
        source,
        f"a line after {number - 1:,} has the index {index:,}, but there are {count:,} columns, "
        "counted from 1. Correct data.names, or remove it.",
    )


def _make_batches(
    labels: npt.NDArray[np.float64],
    cells: Any,
    first: int,
    columns: npt.NDArray[np.int64],
    wanted: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yields blocks of the wanted columns, with at most ``_MAX_CELLS`` cells each."""
    step = max(1, _MAX_CELLS // max(1, cells.shape[1]))
    for start in range(0, len(labels), step):
        dense = cells[start : start + step].toarray()
        values = np.zeros((len(dense), len(columns)))
        is_present = columns + first < dense.shape[1]
        values[:, is_present] = dense[:, columns[is_present] + first]
        remaining = iter(np.ascontiguousarray(values.T))
        arrays = [
            pa.array(labels[start : start + step] if name == LABEL else next(remaining))
            for name in wanted
        ]
        yield pa.RecordBatch.from_arrays(arrays, list(wanted))
