"""Reads a sheet of an Excel workbook: its first row names the columns, and cells become text, as in
a CSV file.
"""

from __future__ import annotations

import datetime
import mmap
import re
import weakref
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_party.data import checks
from vfl_party.data.sources.cells_as_text import MarkedError, written
from vfl_party.data.sources.excel.sheet import (
    Cell,
    Range,
    Row,
    cell_name,
    hidden_rows,
    merged_ranges,
    sheet_rows,
)
from vfl_party.data.sources.unchanged import require_same, state_of
from vfl_party.data.stream import NUMBER, Stream

INSTALL = "pip install openpyxl"
# The most in a block.
_BLOCK_ROWS, _BLOCK_CELLS = 4096, 1 << 18
# Before a file of Excel 97, and before one with a password.
_OLD = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
# In the second kind.
_PASSWORD = "EncryptedPackage".encode("utf-16-le")
# Bytes; a larger part is suspicious if it is many times as large as its compressed bytes.
_SMALL = 64 << 20
# Equal rows without their numbers make 260.
_RATIO, _SHEETS_RATIO = 200, 500
# Rows in which the names of the columns are looked for.
_MOST_ABOVE = 100
# Bytes of a part that is no sheet: it is read whole.
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
_SAVE = 'open it in Excel or LibreOffice, and save it as "Excel workbook" (.xlsx)'


def open_excel(settings: DataSettings) -> Stream:
    """Opens the sheet that ``data.sheet`` names, or else the only visible one that is not empty.
    Raises InputError.
    """
    source = settings.source
    _require_workbook(source)
    book = _Book.open(source)
    sheet, notes = _chosen(book, settings)
    reading = _Sheet.of(book, sheet, settings)
    hidden = book.hidden(sheet)
    if hidden:
        what = "1 row of the sheet is" if hidden == 1 else f"{hidden:,} rows of the sheet are"
        notes += (f"{what} hidden, as by a filter, and read like the others",)
    return Stream(source, tuple(reading.columns), True, reading.blocks, notes=notes)


@dataclass(frozen=True)
class _Format:
    """How Excel shows a number: as a date, with its time, as a duration, with a least number of
    digits.
    """

    is_date: bool
    has_time: bool
    is_duration: bool
    digits: int


@dataclass(eq=False)
class _Book:
    """An open workbook. It is closed when it is no longer used."""

    source: str
    workbook: Any
    stamp: tuple[int, int, int]
    formats: dict[int, _Format] = field(default_factory=dict)
    blanks: frozenset[str] | None = None

    @classmethod
    def open(cls, source: str) -> _Book:
        """Opens a file. Raises InputError if openpyxl cannot."""
        try:
            import openpyxl
        except ImportError:
            text = (
                f"{source}: a workbook of Excel needs openpyxl, which is not installed: {INSTALL}"
            )
            raise InputError(Code.CONFIG_INVALID, text) from None
        try:
            stamp = state_of(source)
            file = Path(source).open("rb")  # noqa: SIM115 - open as long as the book
        except OSError as error:
            raise checks.unreadable(source, f"cannot be read ({error.strerror})") from None
        try:
            with catch_warnings():
                # Of what openpyxl leaves out: styles, validation, conditional formats.
                simplefilter("ignore")
                workbook = openpyxl.load_workbook(
                    file, read_only=True, data_only=True, keep_links=False
                )
        except Exception as error:
            # It raises whatever a damaged file leads to.
            file.close()
            raise _damaged(source) from error
        book = cls(source, workbook, stamp)
        weakref.finalize(book, file.close)
        return book

    def rows(self, sheet: Any) -> Iterator[Row]:
        """Reads the rows of a sheet. Raises InputError if the file is damaged, or has changed since
        it was opened.
        """
        require_same(self.source, self.stamp)
        try:
            # The sheet's XML.
            with sheet._get_source() as file:
                yield from sheet_rows(file)
        except Exception as error:
            raise error if isinstance(error, VflError) else _damaged(self.source) from error

    def merged(self, sheet: Any) -> list[Range]:
        """Returns the ranges of merged cells. Raises InputError if the file is damaged."""
        try:
            with sheet._get_source() as file:
                return sorted(islice(merged_ranges(file), 1 << 20))
        except Exception as error:
            raise _damaged(self.source) from error

    def hidden(self, sheet: Any) -> int:
        """Returns how many rows are hidden. Raises InputError if the file is damaged."""
        try:
            with sheet._get_source() as file:
                return hidden_rows(file)
        except Exception as error:
            raise _damaged(self.source) from error

    def is_empty(self, sheet: Any, cell: Cell) -> bool:
        """Returns whether a cell has no value, or an empty text."""
        return not cell.text or (cell.kind == "s" and cell.text in self._blanks(sheet))

    def text(self, sheet: Any, cell: Cell, row: int) -> str | None:
        """Returns a cell as ``written``. Raises InputError for an error, a formula without a value,
        a damaged cell.
        """
        if not cell.text:
            # A formula that gives an empty text has this kind.
            if cell.is_formula and cell.kind != "str":
                raise self._refused(cell, row, "is a formula whose value is not in the file", _SAVE)
            return None
        if cell.kind == "e":
            name = f" ({cell.text})" if cell.text in _ERRORS else ""
            raise self._refused(
                cell, row, f"holds an error{name}", "correct its formula, or clear it"
            )
        try:
            return written(self._value(sheet, cell))
        except OverflowError:
            raise self._refused(
                cell, row, "has the format of a date and holds none", "correct it"
            ) from None
        except MarkedError as error:
            raise checks.unusable(
                self.source, f"cell {cell_name(cell.column, row)} {error}"
            ) from None
        except (ValueError, IndexError, TypeError) as error:
            raise self._refused(cell, row, "cannot be read", _SAVE) from error

    def _refused(self, cell: Cell, row: int, what: str, advice: str) -> InputError:
        return checks.unusable(self.source, f"cell {cell_name(cell.column, row)} {what}; {advice}")

    def _value(self, sheet: Any, cell: Cell) -> object:
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
        format_ = self._format(sheet, cell.style)
        if format_.is_date:
            return self._date(number, format_)
        return (
            str(number).zfill(format_.digits)
            if isinstance(number, int) and format_.digits
            else number
        )

    def _date(self, number: float, format_: _Format) -> object:
        """Returns the date, date with time, time or duration that a number stands for. Raises
        OverflowError.
        """
        from openpyxl.utils.datetime import from_excel

        try:
            value = from_excel(number, self.workbook.epoch, timedelta=format_.is_duration)
        except ValueError as error:
            raise OverflowError from error
        day = (
            isinstance(value, datetime.datetime)
            and value.time() == datetime.time()
            and not format_.has_time
        )
        return value.date() if day else value

    def _blanks(self, sheet: Any) -> frozenset[str]:
        """Returns the indices of empty texts among those that all sheets share."""
        if self.blanks is None:
            self.blanks = frozenset(
                str(index) for index, text in enumerate(sheet._shared_strings) if not text
            )
        return self.blanks

    def _format(self, sheet: Any, style: int) -> _Format:
        if style not in self.formats:
            from openpyxl.cell.read_only import ReadOnlyCell
            from openpyxl.styles.numbers import is_date_format, is_timedelta_format

            shown = ReadOnlyCell(sheet, 1, 1, None, "n", style).number_format
            # Without colours, countries and literal text.
            plain = re.sub(r'\[[^\]]*\]|"[^"]*"|\\.', "", shown).lower()
            has_time = any(letter in plain for letter in "hs")
            # Such as 00000 for a postcode.
            digits = len(shown) if re.fullmatch("00+", shown) else 0
            self.formats[style] = _Format(
                is_date_format(shown), has_time, is_timedelta_format(shown), digits
            )
        return self.formats[style]


@dataclass(frozen=True, eq=False)
class _Sheet:
    """A sheet whose header has been read.

    header: its row. columns, numbers: the names of the columns, and the columns themselves, from 1.
    merged: the first range of merged cells that lies in one of them at the header or below it. ids:
    the columns of the id, by number.
    """

    book: _Book
    sheet: Any
    header: int
    columns: Sequence[str]
    numbers: Sequence[int]
    merged: Range | None
    ids: frozenset[int]

    @classmethod
    def of(cls, book: _Book, sheet: Any, settings: DataSettings) -> _Sheet:
        """Reads the header: the first row that is not empty, behind those that are skipped. Raises
        InputError.
        """
        rows, skipped = book.rows(sheet), _skipped(book, sheet, settings)
        for row, cells in rows:
            columns = {} if row <= skipped else _names(book, sheet, row, cells)
            if columns:
                _refuse_other_header(book, sheet, settings, row, columns, islice(rows, _MOST_ABOVE))
                touching = (
                    each
                    for each in book.merged(sheet)
                    if each.bottom >= row
                    and any(each.left <= number <= each.right for number in columns)
                )
                merged = next(touching, None)
                ids = frozenset(number for number, name in columns.items() if name in settings.id)
                found = cls(book, sheet, row, tuple(columns.values()), tuple(columns), merged, ids)
                found._require_unmerged(row)
                return found
        what = f"the sheet {sheet.title!r} is empty"
        raise checks.unreadable(
            book.source, f"{what}; its first row must name the columns, or name another data.sheet"
        )

    def blocks(self, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Reads the wanted columns. Raises InputError."""
        checks.require_names(self.book.source, "columns", wanted, self.columns)
        places = {
            self.numbers[self.columns.index(name)]: place for place, name in enumerate(wanted)
        }
        schema = pa.schema([(name, pa.string()) for name in wanted])
        rows = self._texts(places)
        size = max(1, min(_BLOCK_ROWS, _BLOCK_CELLS // max(1, len(wanted))))
        while block := list(islice(rows, size)):
            columns = [pa.array(column, pa.string()) for column in zip(*block, strict=True)]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def _texts(self, places: dict[int, int]) -> Iterator[list[str | None]]:
        """Reads rows of the columns with these numbers, each at its place; empty rows at the end
        are left out.
        """
        book, sheet, known = self.book, self.sheet, set(self.numbers)
        last = self.header
        for row, cells in book.rows(sheet):
            if row <= self.header:
                continue
            texts: list[str | None] = [None] * len(places)
            filled = False
            for cell in cells:
                if not book.is_empty(sheet, cell):
                    if cell.column not in known:
                        what = (
                            f"cell {cell_name(cell.column, row)} has a value, and its column "
                            "has no name in row"
                        )
                        raise checks.unusable(
                            book.source, f"{what} {self.header}; name the column, or clear the cell"
                        )
                    filled = True
                elif not cell.is_formula:
                    continue
                if cell.column in places:
                    text = texts[places[cell.column]] = book.text(sheet, cell, row)
                    if cell.column in self.ids and text is not None and _is_long(text):
                        what = (
                            f"cell {cell_name(cell.column, row)} holds an id as a number of "
                            "more than 15 digits"
                        )
                        raise checks.unusable(
                            book.source,
                            f"{what}, of which Excel keeps 15; write the ids as text, from "
                            "their origin",
                        )
            if filled:
                if row > last + 1:
                    what = (
                        f"row {last + 1} of the sheet {sheet.title!r} is empty, and other rows "
                        "follow"
                    )
                    advice = (
                        "delete it, or what follows if that is no part of the table, such as a sum"
                    )
                    raise checks.unusable(book.source, f"{what}; {advice}")
                self._require_unmerged(row)
                last = row
                yield texts

    def _require_unmerged(self, row: int) -> None:
        if self.merged is not None and row >= self.merged.top:
            ends = (
                cell_name(self.merged.left, self.merged.top),
                cell_name(self.merged.right, self.merged.bottom),
            )
            what = f"the cells {':'.join(ends)} are merged, so only the first of them has a value"
            raise checks.unusable(self.book.source, f"{what}; unmerge them, and fill each")


def _skipped(book: _Book, sheet: Any, settings: DataSettings) -> int:
    """Returns how many rows are skipped: new rows for a trained model may have other titles above
    the names.
    """
    if settings.skip_lines and settings.as_trained:
        for row, cells in islice(book.rows(sheet), settings.skip_lines + _MOST_ABOVE):
            if set(settings.id) <= set(_names(book, sheet, row, cells).values()):
                return row - 1
    return settings.skip_lines


def _names(book: _Book, sheet: Any, row: int, cells: Sequence[Cell]) -> dict[int, str]:
    """Returns the cells of a row that are not empty as names of columns. Raises InputError for an
    error in one.
    """
    filled = [cell for cell in cells if cell.is_formula or not book.is_empty(sheet, cell)]
    named = {cell.column: book.text(sheet, cell, row) for cell in filled}
    bare = {
        number: name.removeprefix(NUMBER).strip()
        for number, name in named.items()
        if name is not None
    }
    return {number: name for number, name in bare.items() if name}


def _refuse_other_header(
    book: _Book,
    sheet: Any,
    settings: DataSettings,
    header: int,
    columns: dict[int, str],
    below: Iterator[Row],
) -> None:
    """Raises InputError if a later row names the columns: it has those of the id, or it is the
    first of several cells.

    A table has two columns at least, so a single cell above it is a title.
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
            what = f"its columns are named in row {row}, and not in row {header}"
            raise checks.unusable(book.source, f"{what}; set data.skip_lines = {row - 1}")
        if len(columns) == 1 and len(filled) > 1 and not wanted:
            what = f"row {header} has one cell, and row {row} has {len(filled)}"
            advice = f"if this one names the columns, set data.skip_lines = {row - 1}"
            raise checks.unusable(book.source, f"{what}; {advice}")


def _is_long(text: str) -> bool:
    """Whether a cell as ``written`` is a number that has more digits than Excel keeps."""
    return text.startswith(NUMBER) and abs(float(text.removeprefix(NUMBER))) >= 1e15


def _chosen(book: _Book, settings: DataSettings) -> tuple[Any, tuple[str, ...]]:
    """Returns the sheet to read, and what was guessed. Raises InputError if there is none, or more
    than one.

    New rows for a trained model are in a workbook of their own, whose sheet may have another name.
    """
    sheets, name = {sheet.title: sheet for sheet in book.workbook.worksheets}, settings.sheet
    if name is not None and (name in sheets or not settings.as_trained):
        if name not in sheets:
            what = f"has no sheet {name!r}, which data.sheet names"
            raise checks.unusable(
                book.source, f"{what}; the nearest: {checks.nearest(name, list(sheets))}"
            )
        return sheets[name], ()
    if len(sheets) == 1:
        return next(iter(sheets.values())), ()
    filled = [sheet for sheet in sheets.values() if _has_rows(book, sheet)]
    visible = [sheet for sheet in filled if sheet.sheet_state == "visible"]
    if len(visible) == 1:
        title = visible[0].title
        return visible[0], (
            f"the sheet {title!r} is read, as the others are empty or hidden; data.sheet "
            "names another",
        )
    if not filled:
        raise checks.unreadable(
            book.source, "has no sheet with rows; give one whose first row names the columns"
        )
    what = "has several sheets" if visible else "has only hidden sheets"
    names = checks.listed([sheet.title for sheet in visible or filled])
    raise checks.unusable(book.source, f"{what} with rows, {names}; name one in data.sheet")


def _has_rows(book: _Book, sheet: Any) -> bool:
    return any(not book.is_empty(sheet, cell) for _, cells in book.rows(sheet) for cell in cells)


def _require_workbook(source: str) -> None:
    """Raises InputError if a file is no workbook in today's format, or if it would fill the
    memory.
    """
    old = source.lower().endswith((".xls", ".xlsb"))
    try:
        with Path(source).open("rb") as file:
            if file.read(len(_OLD)) == _OLD:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
                    if whole.find(_PASSWORD) >= 0:
                        raise checks.unreadable(
                            source, "is protected by a password; save it without one"
                        )
                old = True
        if old:
            raise checks.unreadable(source, f"is in a format of Excel that is not read; {_SAVE}")
        with zipfile.ZipFile(source) as parts:
            for part in parts.infolist():
                # These are read as streams.
                is_sheet = part.filename.startswith("xl/worksheets/")
                ratio, largest = (_SHEETS_RATIO, part.file_size) if is_sheet else (_RATIO, _LARGEST)
                if part.file_size > min(largest, max(_SMALL, ratio * part.compress_size)):
                    what = (
                        f"unpacks to {part.file_size / 2**20:,.0f} MiB in {part.filename!r}, "
                        "which no workbook has"
                    )
                    raise checks.unreadable(source, f"{what}; {_SAVE}")
    except OSError as error:
        raise checks.unreadable(source, f"cannot be read ({error.strerror})") from None
    except zipfile.BadZipFile:
        raise _damaged(source) from None


def _damaged(source: str) -> InputError:
    return checks.unreadable(
        source, f"is not a workbook of Excel that can be read to its end; {_SAVE}"
    )
