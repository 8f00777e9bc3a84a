"""Opens an Excel workbook, and reads its rows and its cells as text."""

from __future__ import annotations

import contextlib
import datetime
import mmap
import re
import weakref
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO
from warnings import catch_warnings, simplefilter

from vfl_common.errors import Code, InputError
from vfl_party.data import checks
from vfl_party.data.sources.excel.sheet import (
    Cell,
    Range,
    Row,
    cell_name,
    count_hidden_rows,
    find_merged_ranges,
    iterate_rows,
)
from vfl_party.data.sources.unchanged import require_same, state_of
from vfl_party.data.stream import MarkedError, write_cell

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
