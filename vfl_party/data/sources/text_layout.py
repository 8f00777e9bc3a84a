"""The layout of a file of separated cells: its encoding, its separator, its columns' names."""

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
from vfl_party.data.sources.packed import BROKEN, open_bytes
from vfl_party.data.sources.signs import UNIT, SeparatorReplacer

SEPARATORS = {",": "','", ";": "';'", "\t": "tabs", "|": "'|'"}
OTHER_KINDS = {
    "pk\x03\x04": "a ZIP or Excel file",
    "%pdf": "a PDF",
    "{": "JSON",
    "[": "JSON",
    "<": "HTML or XML",
}
_SAMPLE_LINES = 200
# Maximum characters of a line and of a cell; more are not a table, or a decompression bomb.
MAX_LINE = 1 << 24
# Maximum characters of the sampled lines.
_MAX_SAMPLED = 1 << 25
# Bytes from which the encoding is guessed.
_SAMPLE_BYTES = 1 << 26
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    # Begins as that of UTF-16 does.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# A letter such as \u00f6 in UTF-8, which is two unlikely characters in Windows-1252.
_TWICE = re.compile(b"\xc3[\x80-\xbf]")
_SIGNS = '",;\t|\n0'
_PACKED = {b"\x1f\x8b": ("gzip", ".gz"), b"BZh": ("bzip2", ".bz2")}
_READ = 1 << 20


@dataclass(frozen=True)
class TextLayout:
    """The layout of a text file.

    Args:
        skip: lines before the one that names the columns.
        names: all, in order.
        header: whether a line of the file names them.
        several: a separator of several characters, for which ``separator`` stands.
    """

    encoding: str
    separator: str
    skip: int
    names: tuple[str, ...]
    notes: tuple[str, ...]
    header: bool = True
    several: str = ""

    def open(self, source: str) -> Any:
        """Opens the file, with its cells between ``separator``."""
        return _open(source, self.several)


def find_layout(settings: DataSettings) -> TextLayout:
    """Finds encoding, separator and names. Raises InputError."""
    source = settings.source
    encoding, guessed = _encoding(settings)
    several = _long_separator(settings, encoding)
    lines = _first_lines(source, several, encoding, settings.skip_lines + _SAMPLE_LINES)
    notes = [guessed] if guessed else []
    skip = _count_skipped(settings, lines)
    _refuse_other_kinds(source, lines)
    header = settings.names is None
    if (
        header
        and skip < len(lines)
        and lines[skip].startswith("sep=")
        and len(lines[skip].strip()) == 5
    ):
        # Excel's line for the separator, which is detected anyway.
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
    separator = UNIT if several else settings.separator or _separator(lines[skip:])
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
    rows = _cells(lines[skip:], separator)
    if not rows:
        raise not_text(source)
    if settings.names is not None:
        from_settings = _names_from_settings(settings, rows[0], skip + 1)
        return TextLayout(encoding, separator, skip, from_settings, tuple(notes), False, several)
    names = tuple(name.strip() for name in rows[0])
    wanted = {name for name in (*settings.id, settings.label) if name is not None}
    if not wanted <= set(names):
        _refuse_other_lines(source, wanted, lines, skip)
    if len(names) == 1 and not wanted:
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


def _long_separator(settings: DataSettings, encoding: str) -> str:
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
    """Returns the names of the settings. Raises InputError if the first row has more or fewer
    cells.
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
    """Returns the names; for a number, that many: ``f1``, ``f2`` and so on."""
    return tuple(f"f{at}" for at in range(1, names + 1)) if isinstance(names, int) else names


def _count_skipped(settings: DataSettings, lines: Sequence[str]) -> int:
    """Returns how many lines are skipped: new rows for a trained model may have other titles above
    the names.
    """
    if settings.skip_lines and settings.as_trained:
        for number, line in enumerate(lines):
            for separator in [settings.separator] if settings.separator else SEPARATORS:
                if set(settings.id) <= {
                    name.strip() for row in _cells([line], separator) for name in row
                }:
                    return number
    return settings.skip_lines


def _refuse_other_kinds(source: str, lines: Sequence[str]) -> None:
    """Raises InputError if the file does not begin as a table of separated cells."""
    start = lines[0].lstrip().lower() if lines else ""
    for mark, kind in OTHER_KINDS.items():
        if start.startswith(mark):
            raise checks.unreadable(
                source, f"is {kind}, whatever its name says. Write it again as CSV."
            )


def _refuse_other_lines(source: str, wanted: Set[str], lines: Sequence[str], skip: int) -> None:
    """Raises InputError if a later line has the wanted columns, so that lines must be skipped."""
    for number, line in enumerate(lines[skip + 1 :], skip + 1):
        for separator in SEPARATORS:
            if wanted <= {name.strip() for row in _cells([line], separator) for name in row}:
                raise checks.unusable(
                    source,
                    f"the columns are named in line {number + 1}, not in line {skip + 1}. Set "
                    f"data.skip_lines = {number}.",
                )


def _refuse_title(source: str, lines: Sequence[str], skip: int) -> None:
    """Raises InputError if the line with the names is a single cell, and later ones are not: it is
    a title.
    """
    for number, line in enumerate(lines[skip + 1 :], skip + 1):
        count = max(
            len(row) for separator in SEPARATORS for row in _cells([line], separator) or [[]]
        )
        if count > 1:
            raise checks.unusable(
                source,
                f"line {skip + 1} has one cell, and line {number + 1} has {count}. If line "
                f"{number + 1} names the columns, set data.skip_lines = {number}.",
            )


def _cells(lines: Sequence[str], separator: str) -> list[list[str]]:
    """Returns the cells of each line that is not blank; [] if quotation marks are misplaced."""
    before = csv.field_size_limit(MAX_LINE)
    try:
        if separator == UNIT:
            return [line.rstrip("\r\n").split(UNIT) for line in lines if line.strip()]
        return [row for row in csv.reader(lines, delimiter=separator) if row]
    except csv.Error:
        return []
    finally:
        csv.field_size_limit(before)


def _encoding(settings: DataSettings) -> tuple[str, str]:
    """Returns the encoding, and a note if it is a guess. Raises InputError if it is unknown or does
    not fit.
    """
    source = settings.source
    if settings.encoding is not None:
        try:
            # Refuses codecs that make no text, such as rot13.
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
            read, data, both = 0, head, False
            while data and read < _SAMPLE_BYTES:
                for name in list(decoders):
                    try:
                        decoders[name].decode(data)
                    except UnicodeDecodeError:
                        del decoders[name]
                both = both or _TWICE.search(data) is not None
                read += len(data)
                data = file.read(_READ)
    except BROKEN:
        raise not_text(source) from None
    if "utf-8" in decoders:
        return "utf-8", ""
    if both:
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


def _first_lines(source: str, several: str, encoding: str, max_lines: int) -> list[str]:
    try:
        with (
            _open(source, several) as file,
            io.TextIOWrapper(file, encoding=encoding, newline="") as text,
        ):
            lines, total = list[str](), 0
            for line in itertools.islice(lines_of(source, text), max_lines):
                lines.append(line)
                total += len(line)
                if total > _MAX_SAMPLED and len(lines) > max_lines - _SAMPLE_LINES + 1:
                    break
            return lines
    except UnicodeError:
        raise not_in(source, encoding) from None
    except (*BROKEN, ValueError):
        raise not_text(source) from None


def lines_of(source: str, text: io.TextIOWrapper) -> Iterator[str]:
    """Yields the lines of a file. Raises InputError for a line that is too long, before all of it
    is in memory.
    """
    for number in itertools.count(1):
        line = text.readline(MAX_LINE + 1)
        if len(line) > MAX_LINE:
            raise too_long(source, number)
        if not line:
            return
        yield line


def _separator(lines: Sequence[str]) -> str:
    """Returns the separator by which the lines have the most cells, the same number in each; a
    comma if there is none.

    If the line of names never has as many cells as the others, a separator by which the others
    agree is returned: the error about the first of them then counts its cells.
    """
    best, max_cells, second = ",", 1, ""
    for separator in SEPARATORS:
        rows = _cells(lines, separator)
        # The last line may have been cut.
        whole = rows[: max(1, len(rows) - 1)]
        if not rows or len(rows[0]) <= max_cells:
            continue
        if sum(len(row) == len(rows[0]) for row in whole) >= 0.9 * len(whole):
            best, max_cells = separator, len(rows[0])
        elif len(rows) > 1 and sum(len(row) == len(rows[1]) > 1 for row in whole) >= 0.9 * (
            len(whole) - 1
        ):
            second = separator
    return best if max_cells > 1 else second or best


def _open(source: str, several: str) -> Any:
    file = open_bytes(source)
    return SeparatorReplacer(source, file, several, MAX_LINE) if several else file


def not_in(source: str, encoding: str) -> Exception:
    """Returns the InputError of a file that is not in ``encoding``."""
    return checks.unreadable(
        source,
        f'is not {encoding.upper()} throughout. Set data.encoding, such as "cp1252" for '
        "Windows-1252.",
    )


def too_long(source: str, line: int) -> Exception:
    """Returns the InputError of a line that is too long for a table."""
    return checks.unreadable(
        source,
        f"line {line:,} has more than {MAX_LINE:,} characters. Write the file again, one row a "
        "line.",
    )


def not_text(source: str) -> Exception:
    """Returns the InputError of a file that cannot be read as separated cells."""
    packed = {".gz": "gzip-compressed ", ".bz2": "bzip2-compressed "}
    kind = f"{packed.get(Path(source).suffix.lower(), '')}CSV"
    return checks.unreadable(source, f"is not a readable {kind} file. Write it again.")
