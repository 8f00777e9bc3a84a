"""Reads a sheet of an Excel workbook. Its first row names the columns, and cells become text, as in
a CSV file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.excel.sheet import Cell, Range, Row, cell_name
from vfl_party.data.sources.excel.workbook import Book, require_workbook
from vfl_party.data.stream import NUMBER, RowStream

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
