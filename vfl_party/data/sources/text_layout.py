"""Finds the layout of a file of separated cells: its encoding, its separator and its column
names.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.files import BROKEN, open_bytes

SEPARATORS = {",": "','", ";": "';'", "\t": "tabs", "|": "'|'"}
OTHER_KINDS = {
    "pk\x03\x04": "a ZIP or Excel file",
    "%pdf": "a PDF",
    "{": "JSON",
    "[": "JSON",
    "<": "HTML or XML",
}
_SAMPLE_LINES = 200
# The maximum number of characters in a line and in a cell. More may be a decompression bomb.
MAX_LINE = 1 << 24
# The maximum number of characters in the sampled lines.
_MAX_SAMPLED = 1 << 25
# The number of bytes from which the encoding is guessed.
_SAMPLE_BYTES = 1 << 26
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    # UTF-32 is tested before UTF-16, because its mark begins with the mark of UTF-16.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# A UTF-8 letter such as \u00f6, whose bytes are an unlikely pair of characters in Windows-1252.
_TWICE = re.compile(b"\xc3[\x80-\xbf]")
_SIGNS = '",;\t|\n0'
_PACKED = {b"\x1f\x8b": ("gzip", ".gz"), b"BZh": ("bzip2", ".bz2")}
_READ = 1 << 20


@dataclass(frozen=True)
class TextLayout:
    """The layout of a text file.

    Args:
        encoding: The encoding of the file.
        separator: The separator between cells, one character.
        skip: The number of lines before the line with the column names.
        names: The names of all columns, in order.
        notes: Notes for people.
        header: Whether a line of the file has the column names.
        several: A separator of several characters, which is replaced by ``separator``.
    """

    encoding: str
    separator: str
    skip: int
    names: tuple[str, ...]
    notes: tuple[str, ...]
    header: bool = True
    several: str = ""

    def open(self, source: str) -> Any:
        """Opens the file. Its cells are separated by ``separator``."""
        return _open(source, self.several)


def find_layout(settings: DataSettings) -> TextLayout:
    """Finds the encoding, the separator and the column names of a file. Raises InputError."""
    source = settings.source
    encoding, guess_note = _find_encoding(settings)
    several = _get_long_separator(settings, encoding)
    lines = _read_first_lines(source, several, encoding, settings.skip_lines + _SAMPLE_LINES)
    notes = [guess_note] if guess_note else []
    skip = _count_skipped(settings, lines)
    _refuse_other_kinds(source, lines)
    header = settings.names is None
    if (
        header
        and skip < len(lines)
        and lines[skip].startswith("sep=")
        and len(lines[skip].strip()) == 5
    ):
        # Excel may write a line with the separator. The line is skipped, because the separator is
        # detected anyway.
        skip += 1
    while skip < len(lines) and not lines[skip].strip():
        skip += 1
    if skip >= len(lines):
        if header:
            raise checks.unreadable(source, "is empty. Name the columns in its first line.")
        raise checks.unreadable(source, "is empty. Give a file with at least one row.")
    if any("\0" in line for line in lines):
        raise checks.unreadable(
            source, 'holds zero bytes. If it is UTF-16, set data.encoding = "utf-16-le".'
        )
    separator = UNIT if several else settings.separator or _find_separator(lines[skip:])
    if not separator.isascii():
        raise checks.unusable(
            source,
            f"data.separator must be an ASCII character (got {separator!r}). Write the file with "
            "another separator.",
        )
    if settings.separator is None and separator != ",":
        notes.append(
            f"cells are separated by {SEPARATORS[separator]}. To change this, set data.separator."
        )
    rows = _split_cells(lines[skip:], separator)
    if not rows:
        raise make_unreadable_error(source)
    if settings.names is not None:
        from_settings = _names_from_settings(settings, rows[0], skip + 1)
        return TextLayout(encoding, separator, skip, from_settings, tuple(notes), False, several)
    names = tuple(name.strip() for name in rows[0])
    wanted_names = {name for name in (*settings.id, settings.label) if name is not None}
    if not wanted_names <= set(names):
        _refuse_other_lines(source, wanted_names, lines, skip)
    if len(names) == 1 and not wanted_names:
        _refuse_title(source, lines, skip)
    if sum(name.replace(".", "", 1).isdigit() for name in names) * 2 > len(names):
        notes.append(
            "the names of most columns are numbers. If no line of the file names the columns, set "
            "data.names."
        )
    unnamed = [place for place, name in enumerate(names, 1) if not name]
    if unnamed:
        places = ", ".join(map(str, unnamed[:5])) + (", …" if len(unnamed) > 5 else "")
        notes.append(
            f"columns without a name are left out (number {places}). Name them to use them."
        )
    return TextLayout(encoding, separator, skip, names, tuple(notes), True, several)


def _get_long_separator(settings: DataSettings, encoding: str) -> str:
    """Returns the separator if it has several characters, else ''. Raises InputError."""
    separator = settings.separator or ""
    if len(separator) < 2:
        return ""
    if not separator.isascii() or not separator.isprintable():
        raise checks.unusable(
            settings.source,
            f"data.separator must hold printable ASCII characters (got {separator!r}). Write the "
            "file with another separator.",
        )
    if encoding.startswith(("utf-16", "utf-32")):
        raise checks.unusable(
            settings.source,
            f"data.separator = {separator!r} has several characters, which needs a UTF-8 file (got "
            f"{encoding.upper()}). Write the file again as UTF-8.",
        )
    return separator


def _names_from_settings(
    settings: DataSettings, first: Sequence[str], line: int
) -> tuple[str, ...]:
    """Returns the column names of the settings. Raises InputError if the first row has another
    number of cells.
    """
    names = make_names(settings.names or ())
    if len(first) != len(names):
        raise checks.unusable(
            settings.source,
            f"line {line} must have {len(names)} cells, as data.names has columns (got "
            f"{len(first)}). Correct data.names, data.separator or data.skip_lines.",
        )
    return names


def make_names(names: tuple[str, ...] | int) -> tuple[str, ...]:
    """Returns the names. If ``names`` is a number, returns as many names: ``f1``, ``f2`` and so
    on.
    """
    return tuple(f"f{at}" for at in range(1, names + 1)) if isinstance(names, int) else names


def _count_skipped(settings: DataSettings, lines: Sequence[str]) -> int:
    """Returns the number of lines to skip. In new rows for a trained model, the column names may be
    in another line than in training.
    """
    if settings.skip_lines and settings.as_trained:
        for number, line in enumerate(lines):
            for separator in [settings.separator] if settings.separator else SEPARATORS:
                if set(settings.id) <= {
                    name.strip() for row in _split_cells([line], separator) for name in row
                }:
                    return number
    return settings.skip_lines


def _refuse_other_kinds(source: str, lines: Sequence[str]) -> None:
    """Raises InputError if the file begins like a file of another kind, such as JSON."""
    start = lines[0].lstrip().lower() if lines else ""
    for mark, kind in OTHER_KINDS.items():
        if start.startswith(mark):
            raise checks.unreadable(source, f"its content is {kind}. Write it again as CSV.")


def _refuse_other_lines(source: str, wanted: Set[str], lines: Sequence[str], skip: int) -> None:
    """Raises InputError if a later line has the names of the wanted columns."""
    for number, line in enumerate(lines[skip + 1 :], skip + 1):
        for separator in SEPARATORS:
            if wanted <= {name.strip() for row in _split_cells([line], separator) for name in row}:
                raise checks.unusable(
                    source,
                    f"the columns are named in line {number + 1}, not in line {skip + 1}. Set "
                    f"data.skip_lines = {number}.",
                )


def _refuse_title(source: str, lines: Sequence[str], skip: int) -> None:
    """Raises InputError if the first line has a single cell, and a later line has several. The
    first line is then a title.
    """
    for number, line in enumerate(lines[skip + 1 :], skip + 1):
        count = max(
            len(row) for separator in SEPARATORS for row in _split_cells([line], separator) or [[]]
        )
        if count > 1:
            raise checks.unusable(
                source,
                f"line {skip + 1} has one cell, and line {number + 1} has {count}. If line "
                f"{number + 1} names the columns, set data.skip_lines = {number}.",
            )


def _split_cells(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Returns the cells of each non-blank line; [] if quotation marks are misplaced."""
    before = csv.field_size_limit(MAX_LINE)
    try:
        if separator == UNIT:
            return [line.rstrip("\r\n").split(UNIT) for line in lines if line.strip()]
        return [row for row in csv.reader(lines, delimiter=separator) if row]
    except csv.Error:
        return []
    finally:
        csv.field_size_limit(before)


def _find_encoding(settings: DataSettings) -> tuple[str, str]:
    """Returns the encoding, and a note if it is a guess. Raises InputError if the encoding is
    unknown or does not fit.
    """
    source = settings.source
    if settings.encoding is not None:
        try:
            # This raises an error for codecs that do not encode text, such as rot13.
            signs = _SIGNS.encode(settings.encoding)
            name = codecs.lookup(settings.encoding).name
            if signs != _SIGNS.encode() and not name.startswith(("utf-16", "utf-32")):
                raise checks.unusable(
                    source,
                    f"data.encoding = {settings.encoding!r} does not write quotation marks as in "
                    "ASCII. Write the file again as UTF-8.",
                )
            return name, ""
        except (LookupError, ValueError):
            raise checks.unusable(
                source,
                f"data.encoding = {settings.encoding!r} is not known to Python. Use utf-8, cp1252 "
                "or utf-16.",
            ) from None
    try:
        with open_bytes(source) as file:
            head = file.read(4)
            for mark, (packer, ending) in _PACKED.items():
                if head.startswith(mark):
                    raise checks.unreadable(
                        source, f"is compressed by {packer}. Give it a name that ends in {ending}."
                    )
            for mark, name in _BOMS:
                if head.startswith(mark):
                    return name, ""
            decoders = {name: codecs.getincrementaldecoder(name)() for name in ("utf-8", "cp1252")}
            read_bytes, data, has_utf8_letter = 0, head, False
            while data and read_bytes < _SAMPLE_BYTES:
                for name in list(decoders):
                    try:
                        decoders[name].decode(data)
                    except UnicodeDecodeError:
                        del decoders[name]
                has_utf8_letter = has_utf8_letter or _TWICE.search(data) is not None
                read_bytes += len(data)
                data = file.read(_READ)
    except BROKEN:
        raise make_unreadable_error(source) from None
    if "utf-8" in decoders:
        return "utf-8", ""
    if has_utf8_letter:
        raise checks.unreadable(
            source,
            "is UTF-8 in some places and not in others. Write it again in one encoding, or set "
            "data.encoding.",
        )
    if "cp1252" in decoders:
        return (
            "cp1252",
            "is not UTF-8 and is read as Windows-1252. To change this, set data.encoding.",
        )
    raise checks.unreadable(
        source,
        "is neither UTF-8 nor Windows-1252. Set data.encoding, or write the file again as UTF-8.",
    )


def _read_first_lines(source: str, several: str, encoding: str, max_lines: int) -> list[str]:
    try:
        with (
            _open(source, several) as file,
            io.TextIOWrapper(file, encoding=encoding, newline="") as text,
        ):
            lines, total = list[str](), 0
            for line in itertools.islice(iterate_lines(source, text), max_lines):
                lines.append(line)
                total += len(line)
                if total > _MAX_SAMPLED and len(lines) > max_lines - _SAMPLE_LINES + 1:
                    break
            return lines
    except UnicodeError:
        raise make_encoding_error(source, encoding) from None
    except (*BROKEN, ValueError):
        raise make_unreadable_error(source) from None


def iterate_lines(source: str, text: io.TextIOWrapper) -> Iterator[str]:
    """Yields the lines of a file. Raises InputError for a line that is too long, without reading
    all of it into memory.
    """
    for number in itertools.count(1):
        line = text.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise make_length_error(source, number)
        if not line:
            return
        yield line


def _find_separator(lines: Sequence[str]) -> str:
    """Returns the separator with which the lines have the most cells, with the same number in each
    line; a comma if there is none.

    If no separator gives the first line as many cells as the other lines, returns a separator with
    which the other lines have the same number of cells. The later error then counts their cells.
    """
    best_separator, max_cells, second_separator = ",", 1, ""
    for separator in SEPARATORS:
        rows = _split_cells(lines, separator)
        # The last line of the sample may be incomplete.
        complete_rows = rows[: max(1, len(rows) - 1)]
        if not rows or len(rows[0]) <= max_cells:
            continue
        if sum(len(row) == len(rows[0]) for row in complete_rows) >= 0.9 * len(complete_rows):
            best_separator, max_cells = separator, len(rows[0])
        elif len(rows) > 1 and sum(len(row) == len(rows[1]) > 1 for row in complete_rows) >= 0.9 * (
            len(complete_rows) - 1
        ):
            second_separator = separator
    return best_separator if max_cells > 1 else second_separator or best_separator


def _open(source: str, several: str) -> Any:
    file = open_bytes(source)
    return SeparatorReplacer(source, file, several, MAX_LINE) if several else file


def make_encoding_error(source: str, encoding: str) -> Exception:
    """Returns the InputError for a file that is not in ``encoding``."""
    return checks.unreadable(
        source,
        f'is not {encoding.upper()} throughout. Set data.encoding, such as "cp1252" for '
        "Windows-1252.",
    )


def make_length_error(source: str, line: int) -> Exception:
    """Returns the InputError for a line that is too long."""
    return checks.unreadable(
        source,
        f"line {line:,} has more than {MAX_LINE:,} characters. Write the file again, one row a "
        "line.",
    )


def make_unreadable_error(source: str) -> Exception:
    """Returns the InputError for a file that cannot be read as separated cells."""
    packed = {".gz": "gzip-compressed ", ".bz2": "bzip2-compressed "}
    kind = f"{packed.get(Path(source).suffix.lower(), '')}CSV"
    return checks.unreadable(source, f"is not a readable {kind} file. Write it again.")


# The value of data.separator for runs of spaces and tabs. Spaces at the ends of a line are ignored.
SPACES = "whitespace"


# The unit separator, which replaces the separator while a file is read. Tables do not use it.
UNIT = "\x1f"


_UNIT = UNIT.encode()


_ENDS = re.compile(rb"(?m)^[ \t]+|[ \t]+(?=\r?$)")


_RUNS = re.compile(rb"[ \t]+")


class SeparatorReplacer(io.RawIOBase):
    """Reads the bytes of a file, with each separator replaced by ``UNIT``.

    Args:
        source: The name of the file, for errors.
        file: The file, which is closed with this object.
        separator: Two or more characters, or ``SPACES``.
        longest: The maximum size of a line in bytes. A longer line raises InputError.
    """

    def __init__(self, source: str, file: Any, separator: str, longest: int) -> None:
        self._source, self._file, self._longest = source, file, longest
        self._separator = None if separator == SPACES else separator.encode()
        self._tail, self._buffer, self._lines = b"", b"", 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Returns at most ``size`` bytes; b"" only at the end of the file."""
        parts, bytes_left = [], size
        while bytes_left:
            if not self._buffer and not self._fill():
                break
            part = self._buffer if bytes_left < 0 else self._buffer[:bytes_left]
            self._buffer = self._buffer[len(part) :]
            parts.append(part)
            bytes_left -= 0 if bytes_left < 0 else len(part)
        return b"".join(parts)

    def readinto(self, buffer: Any) -> int:
        """Reads bytes into a buffer, and returns their number."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _fill(self) -> bool:
        """Reads the next lines into the buffer. Returns False at the end of the file. Raises
        InputError.
        """
        chunks = [self._tail]
        total = len(self._tail)
        while True:
            data = self._file.read(_READ)
            end = data.rfind(b"\n") + 1
            if not data or end:
                break
            chunks.append(data)
            total += len(data)
            if total > self._longest:
                raise checks.unreadable(
                    self._source,
                    f"line {self._lines + 1:,} has more than {self._longest:,} characters. Write "
                    "the file again, one row a line.",
                )
        lines = b"".join([*chunks, data[:end]])
        self._tail = data[end:]
        if _UNIT in lines:
            line = self._lines + lines.count(b"\n", 0, lines.index(_UNIT)) + 1
            raise checks.unreadable(
                self._source,
                f"line {line:,} holds the character U+001F, which stands for data.separator here. "
                "Remove it.",
            )
        self._lines += lines.count(b"\n")
        self._buffer = self._replace_separators(lines)
        return bool(lines)

    def _replace_separators(self, lines: bytes) -> bytes:
        if self._separator is None:
            return _RUNS.sub(_UNIT, _ENDS.sub(b"", lines))
        return lines.replace(self._separator, _UNIT)
