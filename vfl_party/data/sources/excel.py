"""Reads a sheet of an Excel workbook. Its first row names the columns, and cells become text, as in
a CSV file.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import re
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from warnings import catch_warnings, simplefilter

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import checks
from vfl_party.data.sources.excel_sheet import (
    Cell,
    Range,
    Row,
    cell_name,
    count_hidden_rows,
    find_merged_ranges,
    iterate_rows,
)
from vfl_party.data.sources.files import require_same, state_of
from vfl_party.data.stream import NUMBER, MarkedError, RowStream, write_cell

INSTALL = "pip install openpyxl"


# The first bytes of an Excel 97 file, and of a file with a password.
_OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"


# A text that only files with a password contain.
_PASSWORD = "EncryptedPackage".encode("utf-16-le")


# A part of the ZIP file with more bytes than this must not exceed a maximum compression ratio.
_SMALL = 64 << 20


# The maximum compression ratios of a part and of a sheet. A sheet of equal rows reaches 260.
_RATIO, _SHEETS_RATIO = 200, 500


# The maximum size in bytes of parts other than sheets, which are read as a whole.
_LARGEST = 1 << 30


_ERRORS = (
    "#NULL!",
    "#DIV/0!",
    "#VALUE!",
    "#REF!",
    "#NAME?",
    "#NUM!",
    "#N/A",
    "#SPILL!",
    "#CALC!",
    "#GETTING_DATA",
)


_SAVE = 'Open it in Excel or LibreOffice, and save it as "Excel workbook" (.xlsx).'


@dataclass(frozen=True)
class _Format:
    """The number format of a cell. ``digits``: The minimum number of digits."""

    is_date: bool
    has_time: bool
    is_duration: bool
    digits: int


@dataclass(eq=False)
class Book:
    """An open workbook. It is closed when the object is deleted."""

    source: str
    workbook: Any
    stamp: tuple[int, int, int]
    formats: dict[int, _Format] = field(default_factory=dict)
    blanks: frozenset[str] | None = None

    @classmethod
    def open(cls, source: str) -> Book:
        """Opens a file. Raises InputError if openpyxl cannot read it."""
        try:
            import openpyxl
        except ImportError:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{source}: an Excel workbook needs openpyxl, which is not installed. Run "
                f"{INSTALL}.",
            ) from None
        try:
            stamp = state_of(source)
            file = Path(source).open("rb")  # noqa: SIM115 - open as long as the book
        except OSError as error:
            raise checks.unreadable(
                source, f"cannot be read ({error.strerror}). Correct data.source."
            ) from None
        try:
            with catch_warnings():
                # openpyxl warns about features that it ignores, such as conditional formats.
                simplefilter("ignore")
                workbook = openpyxl.load_workbook(
                    file, read_only=True, data_only=True, keep_links=False
                )
        except Exception as error:
            # openpyxl raises many types of errors for a damaged file.
            file.close()
            raise _make_unreadable_error(source) from error
        book = cls(source, workbook, stamp)
        weakref.finalize(book, file.close)
        return book

    def rows(self, sheet: Any) -> Iterator[Row]:
        """Yields the rows of a sheet. Raises InputError if the file is damaged, or has changed
        since it was opened.
        """
        require_same(self.source, self.stamp)
        with self._open_sheet(sheet) as file:
            yield from iterate_rows(file)

    def find_merged(self, sheet: Any) -> list[Range]:
        """Returns the ranges of merged cells. Raises InputError if the file is damaged."""
        with self._open_sheet(sheet) as file:
            return sorted(islice(find_merged_ranges(file), 1 << 20))

    def count_hidden(self, sheet: Any) -> int:
        """Returns the number of hidden rows. Raises InputError if the file is damaged."""
        with self._open_sheet(sheet) as file:
            return count_hidden_rows(file)

    @contextlib.contextmanager
    def _open_sheet(self, sheet: Any) -> Iterator[BinaryIO]:
        """Opens a sheet's XML for a block. An error in the block means that it is damaged."""
        try:
            # _get_source() opens the sheet's XML.
            with sheet._get_source() as file:
                yield file
        except Exception as error:
            raise _make_unreadable_error(self.source) from error

    def is_empty(self, sheet: Any, cell: Cell) -> bool:
        """Returns whether a cell has no value, or an empty text."""
        return not cell.text or (cell.kind == "s" and cell.text in self._find_blanks(sheet))

    def text(self, sheet: Any, cell: Cell, row: int) -> str | None:
        """Converts a cell to text with ``write_cell``. Raises InputError for a cell with an error,
        a formula without a value, or a damaged cell.
        """
        if not cell.text:
            # A formula whose value is an empty text has the kind "str".
            if cell.is_formula and cell.kind != "str":
                raise self._make_cell_error(
                    cell, row, "is a formula whose value is not in the file", _SAVE
                )
            return None
        if cell.kind == "e":
            name = f" ({cell.text})" if cell.text in _ERRORS else ""
            raise self._make_cell_error(
                cell, row, f"holds an error{name}", "Correct its formula, or clear it."
            )
        try:
            return write_cell(self._read_value(sheet, cell))
        except OverflowError:
            raise self._make_cell_error(
                cell, row, "has the format of a date but does not hold a date", "Correct it."
            ) from None
        except MarkedError as error:
            raise checks.unusable(
                self.source, f"cell {cell_name(cell.column, row)} {error}"
            ) from None
        except (ValueError, IndexError, TypeError) as error:
            raise self._make_cell_error(cell, row, "cannot be read", _SAVE) from error

    def _make_cell_error(self, cell: Cell, row: int, problem: str, fix: str) -> InputError:
        """Returns the error about a cell. ``fix``: The fix, as a sentence."""
        return checks.unusable(self.source, f"cell {cell_name(cell.column, row)} {problem}. {fix}")

    def _read_value(self, sheet: Any, cell: Cell) -> object:
        kind, text = cell.kind, cell.text
        if kind == "s":
            return sheet._shared_strings[int(text)]
        if kind in ("str", "inlineStr"):
            return text
        if kind == "b":
            return bool(int(text))
        if kind == "d":
            from openpyxl.utils.datetime import from_ISO8601

            return from_ISO8601(text)
        number = int(text) if text.isdigit() else float(text)
        format_ = self._get_format(sheet, cell.style)
        if format_.is_date:
            return self._to_date(number, format_)
        return (
            str(number).zfill(format_.digits)
            if isinstance(number, int) and format_.digits
            else number
        )

    def _to_date(self, number: float, format_: _Format) -> object:
        """Converts a number to a date, a date with time, a time or a duration. Raises
        OverflowError.
        """
        from openpyxl.utils.datetime import from_excel

        try:
            value = from_excel(number, self.workbook.epoch, timedelta=format_.is_duration)
        except ValueError as error:
            raise OverflowError from error
        is_day = (
            isinstance(value, datetime.datetime)
            and value.time() == datetime.time()
            and not format_.has_time
        )
        return value.date() if is_day else value

    def _find_blanks(self, sheet: Any) -> frozenset[str]:
        """Returns the indices of the shared texts that are empty."""
        if self.blanks is None:
            self.blanks = frozenset(
                str(index) for index, text in enumerate(sheet._shared_strings) if not text
            )
        return self.blanks

    def _get_format(self, sheet: Any, style: int) -> _Format:
        if style not in self.formats:
            from openpyxl.cell.read_only import ReadOnlyCell
            from openpyxl.styles.numbers import is_date_format, is_timedelta_format

            number_format = ReadOnlyCell(sheet, 1, 1, None, "n", style).number_format
            # Colours, countries and literal text are removed from the format.
            format_text = re.sub(r'\[[^\]]*\]|"[^"]*"|\\.', "", number_format).lower()
            has_time = any(letter in format_text for letter in "hs")
            # A format such as 00000 shows a postcode with leading zeros.
            digits = len(number_format) if re.fullmatch("00+", number_format) else 0
            self.formats[style] = _Format(
                is_date_format(number_format), has_time, is_timedelta_format(number_format), digits
            )
        return self.formats[style]


def require_workbook(source: str) -> None:
    """Raises InputError if a file is not a workbook in the current format of Excel, or is too large
    when unpacked.
    """
    is_old = source.lower().endswith((".xls", ".xlsb"))
    try:
        with Path(source).open("rb") as file:
            if file.read(len(_OLD)) == _OLD:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    if data.find(_PASSWORD) >= 0:
                        raise checks.unreadable(
                            source, "is protected by a password. Save it without one."
                        )
                is_old = True
        if is_old:
            raise checks.unreadable(
                source, f"is in an old or binary format of Excel, which is not supported. {_SAVE}"
            )
        with zipfile.ZipFile(source) as parts:
            for part in parts.infolist():
                # Sheets are read as streams, so their size is not limited.
                is_sheet = part.filename.startswith("xl/worksheets/")
                ratio, largest = (_SHEETS_RATIO, part.file_size) if is_sheet else (_RATIO, _LARGEST)
                if part.file_size > min(largest, max(_SMALL, ratio * part.compress_size)):
                    raise checks.unreadable(
                        source,
                        f"unpacks to {part.file_size / 2**20:,.0f} MiB in {part.filename!r}, more "
                        f"than expected for a workbook. {_SAVE}",
                    )
    except OSError as error:
        raise checks.unreadable(
            source, f"cannot be read ({error.strerror}). Correct data.source."
        ) from None
    except zipfile.BadZipFile:
        raise _make_unreadable_error(source) from None


def _make_unreadable_error(source: str) -> InputError:
    return checks.unreadable(source, f"is not a readable workbook of Excel. {_SAVE}")


# The maximum number of rows and of cells in a block.
_BLOCK_ROWS, _BLOCK_CELLS = 4096, 1 << 18
# The number of rows that are searched for the names of the columns.
_MAX_ABOVE = 100


def open_excel(settings: DataSettings) -> RowStream:
    """Opens the sheet that ``data.sheet`` names, or the only visible sheet that is not empty.
    Raises InputError.
    """
    source = settings.source
    require_workbook(source)
    book = Book.open(source)
    sheet, notes = _choose_sheet(book, settings)
    reading = _Sheet.of(book, sheet, settings)
    hidden = book.count_hidden(sheet)
    if hidden:
        notes += (
            "1 row of the sheet is hidden, as by a filter, and read like the others. Delete it if "
            "it is not a row of the table."
            if hidden == 1
            else f"{hidden:,} rows of the sheet are hidden, as by a filter, and read like the "
            "others. Delete them if they are not rows of the table.",
        )
    return RowStream(source, tuple(reading.columns), True, reading.blocks, notes=notes)


@dataclass(frozen=True, eq=False)
class _Sheet:
    """A sheet whose header has been read.

    Args:
        book: The workbook.
        sheet: The sheet, as openpyxl opened it.
        header: The row number of the header.
        columns: The names of the columns.
        numbers: The numbers of the columns, from 1.
        merged: The first range of merged cells in these columns, in the header or below it.
        ids: The numbers of the id columns.
    """

    book: Book
    sheet: Any
    header: int
    columns: Sequence[str]
    numbers: Sequence[int]
    merged: Range | None
    ids: frozenset[int]

    @classmethod
    def of(cls, book: Book, sheet: Any, settings: DataSettings) -> _Sheet:
        """Reads the header: the first non-empty row after the skipped rows. Raises InputError."""
        rows, skipped = book.rows(sheet), _count_skipped(book, sheet, settings)
        for row, cells in rows:
            columns = {} if row <= skipped else _read_names(book, sheet, row, cells)
            if columns:
                _refuse_other_header(book, sheet, settings, row, columns, islice(rows, _MAX_ABOVE))
                merged_ranges = (
                    range_
                    for range_ in book.find_merged(sheet)
                    if range_.bottom >= row
                    and any(range_.left <= number <= range_.right for number in columns)
                )
                merged = next(merged_ranges, None)
                ids = frozenset(number for number, name in columns.items() if name in settings.id)
                reading = cls(
                    book, sheet, row, tuple(columns.values()), tuple(columns), merged, ids
                )
                reading._require_unmerged(row)
                return reading
        raise checks.unreadable(
            book.source,
            f"the sheet {sheet.title!r} is empty. Name the columns in its first row, or name "
            "another sheet in data.sheet.",
        )

    def blocks(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields blocks of rows with the wanted columns. Raises InputError."""
        checks.require_names(self.book.source, "columns", wanted, self.columns)
        places = {
            self.numbers[self.columns.index(name)]: place for place, name in enumerate(wanted)
        }
        schema = pa.schema([(name, pa.string()) for name in wanted])
        rows = self._iterate_texts(places)
        size = max(1, min(_BLOCK_ROWS, _BLOCK_CELLS // max(1, len(wanted))))
        while block := list(islice(rows, size)):
            columns = [pa.array(column, pa.string()) for column in zip(*block, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _iterate_texts(self, places: dict[int, int]) -> Iterator[list[str | None]]:
        """Yields the cells of each row as text. ``places``: For the number of each wanted column,
        its position in the result. Empty rows at the end are left out.
        """
        book, sheet, column_numbers = self.book, self.sheet, set(self.numbers)
        last_row = self.header
        for row, cells in book.rows(sheet):
            if row <= self.header:
                continue
            texts: list[str | None] = [None] * len(places)
            has_value = False
            for cell in cells:
                if not book.is_empty(sheet, cell):
                    if cell.column not in column_numbers:
                        raise checks.unusable(
                            book.source,
                            f"cell {cell_name(cell.column, row)} has a value, but its column has "
                            f"no name in row {self.header}. Name the column, or clear the cell.",
                        )
                    has_value = True
                elif not cell.is_formula:
                    continue
                if cell.column in places:
                    text = texts[places[cell.column]] = book.text(sheet, cell, row)
                    if cell.column in self.ids and text is not None and _is_long(text):
                        raise checks.unusable(
                            book.source,
                            f"cell {cell_name(cell.column, row)} holds an id as a number of more "
                            "than 15 digits, of which Excel keeps 15. Write the ids as text, "
                            "from their origin.",
                        )
            if has_value:
                if row > last_row + 1:
                    raise checks.unusable(
                        book.source,
                        f"row {last_row + 1} of the sheet {sheet.title!r} is empty, and other rows "
                        "follow. Delete it, or delete what follows if that is not part of the "
                        "table, such as a total.",
                    )
                self._require_unmerged(row)
                last_row = row
                yield texts

    def _require_unmerged(self, row: int) -> None:
        if self.merged is not None and row >= self.merged.top:
            first = cell_name(self.merged.left, self.merged.top)
            last = cell_name(self.merged.right, self.merged.bottom)
            raise checks.unusable(
                self.book.source,
                f"the cells {first}:{last} are merged, so only the first of them has a value. "
                "Unmerge them, and fill each cell.",
            )


def _count_skipped(book: Book, sheet: Any, settings: DataSettings) -> int:
    """Returns the number of rows to skip. In new rows for a trained model, the header may be in
    another row than in training.
    """
    if settings.skip_lines and settings.as_trained:
        for row, cells in islice(book.rows(sheet), settings.skip_lines + _MAX_ABOVE):
            if set(settings.id) <= set(_read_names(book, sheet, row, cells).values()):
                return row - 1
    return settings.skip_lines


def _read_names(book: Book, sheet: Any, row: int, cells: Sequence[Cell]) -> dict[int, str]:
    """Returns the non-empty cells of a row as column names, by column number. Raises InputError for
    a cell with an error.
    """
    filled = [cell for cell in cells if cell.is_formula or not book.is_empty(sheet, cell)]
    texts = {cell.column: book.text(sheet, cell, row) for cell in filled}
    names = {
        number: name.removeprefix(NUMBER).strip()
        for number, name in texts.items()
        if name is not None
    }
    return {number: name for number, name in names.items() if name}


def _refuse_other_header(
    book: Book,
    sheet: Any,
    settings: DataSettings,
    header: int,
    columns: dict[int, str],
    below: Iterator[Row],
) -> None:
    """Raises InputError if a later row seems to be the header: it has the names of the id columns,
    or it is the first row with several cells.

    A table has at least two columns, so a row with a single cell is a title.
    """
    wanted = {name for name in (*settings.id, settings.label) if name is not None}
    if wanted <= set(columns.values()) and (wanted or len(columns) > 1):
        return
    for row, cells in below:
        filled = [cell for cell in cells if not book.is_empty(sheet, cell)]
        texts = {
            text.strip()
            for cell in filled
            if cell.kind != "e" and (text := book.text(sheet, cell, row))
        }
        if wanted and wanted <= texts:
            raise checks.unusable(
                book.source,
                f"the columns are named in row {row}, not in row {header}. Set "
                f"data.skip_lines = {row - 1}.",
            )
        if len(columns) == 1 and len(filled) > 1 and not wanted:
            raise checks.unusable(
                book.source,
                f"row {header} has one cell, and row {row} has {len(filled)}. If row {row} names "
                f"the columns, set data.skip_lines = {row - 1}.",
            )


def _is_long(text: str) -> bool:
    """Returns whether a cell is a number with more digits than Excel keeps."""
    return text.startswith(NUMBER) and abs(float(text.removeprefix(NUMBER))) >= 1e15


def _choose_sheet(book: Book, settings: DataSettings) -> tuple[Any, tuple[str, ...]]:
    """Returns the sheet to read, and notes for people. Raises InputError if no sheet or several
    sheets can be read.

    New rows for a trained model may be in a workbook whose sheet has another name.
    """
    sheets, name = {sheet.title: sheet for sheet in book.workbook.worksheets}, settings.sheet
    if name is not None and (name in sheets or not settings.as_trained):
        if name not in sheets:
            raise checks.unusable(
                book.source,
                f"has no sheet {name!r} (the nearest: {checks.nearest(name, list(sheets))}). "
                "Correct data.sheet.",
            )
        return sheets[name], ()
    if len(sheets) == 1:
        return next(iter(sheets.values())), ()
    filled = [sheet for sheet in sheets.values() if _has_rows(book, sheet)]
    visible = [sheet for sheet in filled if sheet.sheet_state == "visible"]
    if len(visible) == 1:
        return visible[0], (
            f"the sheet {visible[0].title!r} is read, because the others are empty or hidden. To "
            "read another, set data.sheet.",
        )
    if not filled:
        raise checks.unreadable(
            book.source, "has no sheet with rows. Give one whose first row names the columns."
        )
    names = checks.list_names([sheet.title for sheet in visible or filled])
    if visible:
        raise checks.unusable(
            book.source, f"has several sheets with rows, {names}. Name one in data.sheet."
        )
    raise checks.unusable(
        book.source, f"has rows only in hidden sheets, {names}. Name one in data.sheet."
    )


def _has_rows(book: Book, sheet: Any) -> bool:
    return any(not book.is_empty(sheet, cell) for _, cells in book.rows(sheet) for cell in cells)
