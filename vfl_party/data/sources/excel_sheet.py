"""Reads the rows of an Excel sheet from its XML, as a stream.

openpyxl's own reader needs memory for every row, ignores merged cells, and cannot distinguish an
empty cell from a formula without a stored value. openpyxl reads the other parts of a workbook.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple
from xml.parsers import expat

# Excel's maximum numbers of rows and columns in a sheet.
LAST_ROW, LAST_COLUMN = 1 << 20, 1 << 14
# The maximum number of characters in a cell. Excel allows 32,767.
_LONGEST_TEXT = 1 << 20
# The maximum size of an XML tag in bytes.
_LONGEST_TOKEN = 1 << 20
_CHUNK = 1 << 16
_MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main "
_DATA, _ROW, _CELL, _FORMULA = (f"{_MAIN}{name}" for name in ("sheetData", "row", "c", "f"))
_TEXTS = {f"{_MAIN}{name}" for name in ("v", "t")}
# The element with phonetic text, which is not part of the cell's text.
_PHONETIC = f"{_MAIN}rPh"
_MERGED = re.compile(
    rb"<(?:[\w.-]+:)?mergeCell\s[^<>]*?ref=[\"']([A-Z]+)([0-9]+):([A-Z]+)([0-9]+)[\"']"
)
_HIDDEN = re.compile(rb"<(?:[\w.-]+:)?row\s[^<>]*?hidden=[\"'](?:1|true)[\"']")
# The number of bytes kept between chunks, more than the size of a tag that is searched.
_OVERLAP = 1 << 10


class Cell(NamedTuple):
    """A cell as stored in the file.

    column: The number of the column, from 1.
    kind: ``n`` for a number, ``s`` for the index of a shared text, ``str`` and ``inlineStr`` for
    text, ``b`` for a boolean, ``d`` for an ISO date, ``e`` for an error.
    style: The index of the style.
    text: The value as text; '' if there is none.
    """

    column: int
    kind: str
    style: int
    text: str
    is_formula: bool


class Range(NamedTuple):
    """A range of cells. Rows and columns count from 1, and both ends are included."""

    top: int
    left: int
    bottom: int
    right: int


# The number of a row, from 1, and its cells from left to right, including empty cells with a
# format.
Row = tuple[int, list[Cell]]


def iterate_rows(file: BinaryIO) -> Iterator[Row]:
    """Yields the rows of a sheet's XML, including empty rows. Raises ValueError or ExpatError if
    the XML is damaged.
    """
    parser = _Parser()
    while not parser.done and (chunk := file.read(_CHUNK)):
        yield from parser.feed(chunk)
    if not parser.done:
        raise ValueError("the XML of the sheet ends too early")


def find_merged_ranges(file: BinaryIO) -> Iterator[Range]:
    """Finds the ranges of merged cells, which follow the rows in a sheet's XML."""
    for left, top, right, bottom in _find_tags(file, _MERGED, b"mergeCell"):
        yield Range(
            int(top), column_number(left.decode()), int(bottom), column_number(right.decode())
        )


def count_hidden_rows(file: BinaryIO) -> int:
    """Counts the hidden rows of a sheet's XML."""
    return sum(1 for _ in _find_tags(file, _HIDDEN, b"hidden"))


def _find_tags(
    file: BinaryIO, pattern: re.Pattern[bytes], word: bytes
) -> Iterator[tuple[bytes, ...]]:
    """Yields the groups of each match of a pattern, which contains the word."""
    tail = b""
    while chunk := file.read(1 << 20):
        text = tail + chunk
        end = 0
        # The regular expression is slow, so it is used only in chunks that may have a match.
        for match in pattern.finditer(text) if word in text else ():
            end = match.end()
            yield match.groups()
        tail = text[max(end, len(text) - _OVERLAP) :]


def column_number(letters: str) -> int:
    """Returns the number of a column: 28 for AB. Raises ValueError for an invalid column."""
    number = 0
    for letter in letters:
        number = number * 26 + ord(letter) - 64
        if not ("A" <= letter <= "Z" and number <= LAST_COLUMN):
            raise ValueError(f"not the letters of a column (got {letters!r})")
    return number


def cell_name(column: int, row: int) -> str:
    """Returns the name of a cell, such as B4."""
    letters = ""
    while column:
        column, letter = divmod(column - 1, 26)
        letters = chr(65 + letter) + letters
    return f"{letters}{row}"


class _Parser:
    """Parses a sheet's XML chunk by chunk."""

    def __init__(self) -> None:
        self.done = False
        self._rows: list[Row] = []
        self._cells: list[Cell] = []
        # The number of each column by its letters.
        self._numbers: dict[str, int] = {}
        self._row = self._column = self._style = self._fed_bytes = 0
        self._kind, self._is_formula = "n", False
        self._text: list[str] = []
        self._in_text = self._in_phonetic = False
        self._expat = expat.ParserCreate("utf-8", " ")
        self._expat.buffer_text = True
        self._expat.StartElementHandler = self._start_element
        self._expat.EndElementHandler = self._end_element
        self._expat.CharacterDataHandler = self._add_text
        self._expat.StartDoctypeDeclHandler = self._refuse

    def feed(self, chunk: bytes) -> list[Row]:
        """Parses the next chunk, and returns the rows that are now complete."""
        self._fed_bytes += len(chunk)
        self._expat.Parse(chunk)
        if self._fed_bytes - self._expat.CurrentByteIndex > _LONGEST_TOKEN:
            raise ValueError("a tag is too long")
        rows, self._rows = self._rows, []
        return rows

    def _start_element(self, name: str, attributes: dict[str, str]) -> None:
        if name == _CELL:
            self._begin_cell(attributes)
        elif name in _TEXTS:
            self._in_text = not self._in_phonetic
        elif name == _FORMULA:
            self._is_formula = True
        elif name == _ROW:
            previous, self._row = self._row, int(attributes.get("r", self._row + 1))
            if not previous < self._row <= LAST_ROW:
                raise ValueError("rows are not in order")
            self._cells, self._column = [], 0
        elif name == _PHONETIC:
            self._in_phonetic = True

    def _begin_cell(self, attributes: dict[str, str]) -> None:
        previous, name = self._column, attributes.get("r")
        if name is None:
            self._column += 1
        else:
            letters = name.rstrip("0123456789")
            number = self._numbers.get(letters)
            if number is None:
                number = self._numbers[letters] = column_number(letters)
            self._column = number
        if not previous < self._column <= LAST_COLUMN:
            raise ValueError("cells are not in order")
        self._kind, self._style = attributes.get("t", "n"), int(attributes.get("s", 0))
        self._text, self._is_formula = [], False

    def _add_text(self, text: str) -> None:
        if self._in_text:
            self._text.append(text)
            if len(self._text) > 1 and sum(map(len, self._text)) > _LONGEST_TEXT:
                raise ValueError("a cell is too long")

    def _end_element(self, name: str) -> None:
        if name == _CELL:
            text = "".join(self._text)
            self._cells.append(Cell(self._column, self._kind, self._style, text, self._is_formula))
        elif name in _TEXTS:
            self._in_text = False
        elif name == _ROW:
            self._rows.append((self._row, self._cells))
            self._cells = []
        elif name == _PHONETIC:
            self._in_phonetic = False
        elif name == _DATA:
            self.done = True

    def _refuse(self, *_declared: Any) -> None:
        raise ValueError("a document type is declared")
