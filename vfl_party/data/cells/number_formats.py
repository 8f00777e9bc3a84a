"""Cells that a person wrote as text: finds how a table writes numbers and dates, and reads them.

The formats depend only on the first rows (``SAMPLE``), not on how the table is cut into blocks. A
column that later rows contradict is examined again, with these rows.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.errors import InputError
from vfl_party.data import checks
from vfl_party.data.cells.codes import note_codes
from vfl_party.data.cells.dates import Dates, find_dates, not_all_dates
from vfl_party.data.cells.texts import every, mask_numbers, plain, trim
from vfl_party.data.stream import NUMBER

# Number of rows from which the formats are found.
SAMPLE = 10_000
# Signs next to a number; dropped if all cells of a column have the same.
SIGNS = ("%", "€", "$", "£", "¥", "₹", "EUR", "USD", "CHF", "GBP")
# Plain, no-break, narrow and thin spaces between thousands.
_SPACES = " \u00a0\u202f\u2009"
# What people type between thousands.
_BETWEEN = {" ": f"[{_SPACES}]", "'": "['\u2019\u2032`\u00b4]"}


@dataclass(frozen=True)
class Style:
    """How numbers are written: the decimal point, and what may separate thousands ('' for
    nothing).
    """

    decimal: str = "."
    thousands: str = ""

    @property
    def description(self) -> str:
        """The style in words, such as "a decimal comma and spaces between thousands"."""
        between = {"": "", " ": " and spaces between thousands", "'": " and ' between thousands"}
        default = f" and {self.thousands!r} between thousands"
        kind = "comma" if self.decimal == "," else "point"
        return f"a decimal {kind}{between.get(self.thousands, default)}"


PLAIN = Style()
_STYLES = tuple(Style(*signs) for signs in (",.", ", ", ".,", ". ", ".'", ",'"))


@dataclass(frozen=True)
class Numbers:
    """A column of numbers.

    Args:
        style: how they are written.
        sign: dropped from each of them, such as %.
        marked: whether cells that were numbers in the source begin with ``NUMBER``.
    """

    style: Style = PLAIN
    sign: str = ""
    marked: bool = False

    def read(self, text: pa.Array) -> pa.Array | None:
        """Returns float64 [B], null if missing; None if a cell is not a number."""
        if self.marked:
            numbers = Numbers(self.style, self.sign).read(mask_numbers(text))
            is_number = pc.fill_null(pc.starts_with(text, NUMBER), False)
            # A column with 7% and the number 0.05 is ambiguous.
            if self.sign and pc.any(is_number).as_py():
                return None
            marked = pc.if_else(
                is_number, pc.utf8_slice_codeunits(text, 1), pa.scalar(None, text.type)
            )
            return (
                None
                if numbers is None
                else pc.if_else(is_number, pc.cast(marked, pa.float64()), numbers)
            )
        text = trim(text)
        if self.sign:
            bare = _strip_sign(text, self.sign)
            if pc.any(pc.equal(bare, text)).as_py():
                return None
            text = bare
        if self.style != PLAIN:
            if not every(pc.match_substring_regex(text, _pattern(self.style))):
                return None
            text = _plainly(text, self.style)
        try:
            return pc.cast(text, pa.float64())
        except pa.ArrowInvalid:
            return None


@dataclass(frozen=True)
class Words:
    """A column of categories."""


Reading = Numbers | Dates | Words


class Points:
    """Detects numbers such as 1.234 that are ambiguous because no other number of the table has a
    decimal point.
    """

    def __init__(self, source: str) -> None:
        self._source, self._grouped, self._shown = source, "", False

    def look(self, name: str, text: pa.Array, reading: Numbers) -> None:
        """Examines some cells of a column of numbers."""
        if self._shown:
            return
        text = _strip_sign(mask_numbers(text), reading.sign)
        pointed = text.filter(pc.match_substring(text, "."))
        if len(pointed):
            self._shown = not every(
                pc.match_substring_regex(pointed, r"^[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})$")
            )
            self._grouped = self._grouped or name

    def decide(self) -> None:
        """Raises InputError if a column has such numbers, and no other number has a decimal
        point.
        """
        if self._grouped and not self._shown:
            raise _ambiguous_numbers(self._source, self._grouped, "point", ".")


@dataclass(frozen=True)
class Findings:
    """How each column is read.

    Args:
        readings: by column.
        style: of the numbers.
        notes: for people.
        points: None if a point can only be the decimal one.
        marked: see ``Numbers``.
    """

    readings: Mapping[str, Reading]
    style: Style = PLAIN
    notes: tuple[str, ...] = field(default=())
    points: Points | None = None
    marked: bool = False


def find(
    source: str,
    sample: Mapping[str, pa.Array],
    settings: DataSettings,
    *,
    commas: bool,
    marked: bool = False,
    words: Collection[str] = (),
) -> Findings:
    """Finds how columns are read, from their first cells.

    Args:
        source: the table's name, for errors.
        sample: {column: its first cells}.
        settings: of the table.
        commas: whether commas separate the cells of the table.
        marked: see ``Numbers``.
        words: columns that later rows show to be categories.

    Raises InputError if numbers or dates are ambiguous and no setting decides.
    """
    style, notes = _style(
        source, {name: mask_numbers(text) for name, text in sample.items()}, settings, commas=commas
    )
    readings: dict[str, Reading] = {}
    signs: dict[str, list[str]] = {}
    for name, text in sample.items():
        reading = (
            None if name in words else _reading(source, name, text, style, settings, marked=marked)
        )
        readings[name] = reading or Words()
        if isinstance(reading, Numbers) and reading.sign:
            signs.setdefault(reading.sign, []).append(name)
        if isinstance(reading, Dates):
            notes.append(
                f"column {name!r} holds dates of the form {reading.form}, read as days since "
                "1970-01-01. To change this, set data.dates or data.categorical."
                if reading.form
                else f"column {name!r} holds dates, read as days since 1970-01-01. To change this, "
                "set data.dates or data.categorical."
            )
    _require_forms(source, readings, settings)
    notes += [
        f"{sign} is dropped from the numbers of {checks.list_names(names)}"
        for sign, names in signs.items()
    ]
    numbers = [name for name, reading in readings.items() if isinstance(reading, Numbers)]
    notes += note_codes({name: trim(plain(sample[name])) for name in numbers})
    decided = commas or settings.decimal is not None or settings.thousands is not None
    points = Points(source) if style == PLAIN and not decided else None
    return Findings(readings, style, tuple(notes), points, marked)


def _require_forms(source: str, readings: Mapping[str, Reading], settings: DataSettings) -> None:
    """Raises InputError if a format of ``data.dates`` fits none of its cells."""
    forms = {name: reading.form for name, reading in readings.items() if isinstance(reading, Dates)}
    if isinstance(settings.dates, dict):
        for name, form in settings.dates.items():
            if name in readings and forms.get(name) != form:
                raise checks.unusable(
                    source,
                    f"data.dates = {form!r} does not fit the cells of column {name!r}. Write it as "
                    'for strptime, such as "%d.%m.%Y", or remove it.',
                )
    elif settings.dates is not None and readings and settings.dates not in forms.values():
        raise checks.unusable(
            source,
            f"data.dates = {settings.dates!r} fits the cells of no column. Write it as for "
            'strptime, such as "%d.%m.%Y", or remove it.',
        )


def _reading(
    source: str, name: str, text: pa.Array, style: Style, settings: DataSettings, *, marked: bool
) -> Reading | None:
    """Returns how a column is read; None for words. Dates of ``data.dates`` precede numbers, such
    as 20240131.
    """
    no_feature = name in (settings.label, *settings.beside)
    form = settings.date_form(name)
    if form is None or no_feature:
        return _numbers(text, style, marked) or (
            None if no_feature else find_dates(source, name, text)
        )
    dates = Dates(form, marked=marked)
    fits = dates.fits(text)
    wrong, right = pc.sum(pc.invert(fits)).as_py() or 0, pc.sum(fits).as_py() or 0
    if right > wrong > 0:
        raise not_all_dates(source, name, form)
    if right and not wrong:
        return dates
    reading: Reading | None = _numbers(text, style, marked)
    # A table may have dates of several forms.
    if reading is None:
        # If day and month cannot be told apart, the cells are words, and a note says so.
        with contextlib.suppress(InputError):
            reading = find_dates(source, name, text)
    return reading


def _pattern(style: Style) -> str:
    """Returns a regular expression of the numbers of a style; thousands may be separated, or
    not.
    """
    between = _BETWEEN.get(style.thousands, re.escape(style.thousands))
    # Nobody writes 0,513 for 513.
    groups = f"[1-9][0-9]{{0,2}}(?:{between}[0-9]{{3}})+|" if style.thousands else ""
    # Indian groups such as 1,23,456.
    groups += (
        f"[1-9][0-9]?(?:{between}[0-9]{{2}})+{between}[0-9]{{3}}|" if style.thousands == "," else ""
    )
    decimal = re.escape(style.decimal)
    return f"^[+-]?(?:(?:{groups}[0-9]+)(?:{decimal}[0-9]*)?|{decimal}[0-9]+)(?:[eE][+-]?[0-9]+)?$"


def _plainly(text: pa.Array, style: Style) -> pa.Array:
    if style.thousands:
        between = _BETWEEN.get(style.thousands, re.escape(style.thousands))
        text = pc.replace_substring_regex(text, between, "")
    return pc.replace_substring(text, style.decimal, ".") if style.decimal != "." else text


def _sign(text: pa.Array) -> str:
    """Returns the sign that every cell has at one of its ends, or ''."""
    present = pc.drop_null(trim(text))
    first = present[0].as_py() if len(present) else ""
    for sign in SIGNS:
        if sign in first and every(
            pc.match_substring_regex(present, f"^[+-]?{re.escape(sign)}|{re.escape(sign)}$")
        ):
            return sign
    return ""


def _numbers(text: pa.Array, style: Style, marked: bool) -> Numbers | None:
    for numbers in (
        Numbers(style, marked=marked),
        Numbers(style, _sign(mask_numbers(text)), marked),
    ):
        if numbers.read(text) is not None:
            return numbers
    return None


def _style(
    source: str, sample: Mapping[str, pa.Array], settings: DataSettings, *, commas: bool
) -> tuple[Style, list[str]]:
    """Returns the style in which most columns are numbers (the plain one if no other fits more),
    and notes.
    """
    fits = _list_styles(settings)
    bare = {name: _strip_sign(text, _sign(text)) for name, text in sample.items()}
    odd = [name for name, text in bare.items() if Numbers(fits[0]).read(text) is None]
    if not odd:
        return fits[0], []
    read = {style: _readable(bare, style) for style in fits}
    max_columns = max(map(len, read.values()))
    best = [style for style, columns in read.items() if len(columns) == max_columns]
    chosen = best[0]
    known = settings.like
    chosen = next(
        (style for style in best if known is not None and style.decimal == known[0]), chosen
    )
    other = next((style for style in best if style.decimal != chosen.decimal), chosen)
    differ = [
        name
        for name, values in read[chosen].items()
        if not values.equals(read[other].get(name, values))
    ]
    if differ and (known is None or known[0] != chosen.decimal):
        if not commas:
            raise _ambiguous_numbers(source, differ[0], "comma", ",")
        # A file separated by commas is mostly English.
        chosen = chosen if chosen.decimal == "." else other
    names = [name for name in odd if name in read[chosen]]
    if not names:
        return chosen, []
    examples = checks.list_names(sorted(names), max_names=3)
    notes = [
        f"numbers are read with {chosen.description}, as in {examples}. To change this, set "
        "data.decimal and data.thousands."
    ]
    others = [
        name
        for name in bare
        if name not in odd and _differs(bare[name], fits[0], read[chosen].get(name))
    ]
    if others:
        notes.append(
            f"{checks.list_names(others)} are different numbers with {fits[0].description}. Check "
            "them, and set data.decimal and data.thousands."
        )
    return chosen, notes


def _list_styles(settings: DataSettings) -> list[Style]:
    """Returns the styles that the settings allow, the plainest first."""
    decimal, thousands = settings.decimal, settings.thousands
    if decimal is not None and thousands is not None:
        return [Style(decimal, thousands)]
    styles = (PLAIN, Style(",", ""), *_STYLES)
    return [
        style
        for style in styles
        if decimal in (None, style.decimal) and thousands in (None, style.thousands)
    ]


def _differs(text: pa.Array, style: Style, values: pa.Array | None) -> bool:
    """Returns whether cells fit a style in which they are other numbers than ``values``."""
    return values is not None and not values.equals(Numbers(style).read(text))


def _readable(columns: Mapping[str, pa.Array], style: Style) -> dict[str, pa.Array]:
    readings = {name: Numbers(style).read(text) for name, text in columns.items()}
    return {name: values for name, values in readings.items() if values is not None}


def _strip_sign(text: pa.Array, sign: str) -> pa.Array:
    """Returns the cells without a sign at one of their ends, and without white space."""
    mark = re.escape(sign)
    # The sign may follow a minus: -€5 is -5.
    ends = f"^([+-]?){mark}\\s*|\\s*{mark}$"
    return pc.replace_substring_regex(trim(text), ends, r"\1") if sign else trim(text)


def _ambiguous_numbers(source: str, name: str, what: str, mark: str) -> InputError:
    return checks.unusable(
        source,
        f"column {name!r} holds numbers that can be read in two ways: with a decimal {what}, or "
        f'with a {what} between thousands. Set data.decimal to "{mark}" or data.thousands to '
        f'"{mark}".',
    )


def filter_unlike(text: pa.Array, reading: Numbers) -> pa.Array:
    """Returns the cells that are not written as ``reading`` expects."""
    present = pc.drop_null(trim(mask_numbers(text)))
    return present.filter(
        pc.invert(
            pc.match_substring_regex(_strip_sign(present, reading.sign), _pattern(reading.style))
        )
    )


def look_like_numbers(words: pa.Array) -> pa.Array:
    """Returns for each text whether it is a number in any style, with or without a sign."""
    present = trim(words)
    # Accountants write negative numbers in parentheses.
    present = pc.replace_substring_regex(present, r"^\((.*)\)$", r"-\1")
    present = pc.replace_substring_regex(present, "^(?:\u2212|\u2013)|-$", "")
    sign = "|".join(map(re.escape, SIGNS))
    bare = pc.replace_substring_regex(present, f"^(?:{sign})\\s*|\\s*(?:{sign})$", "")
    masks = [pc.match_substring_regex(bare, _pattern(style)) for style in (PLAIN, *_STYLES)]
    return pc.fill_null(functools.reduce(pc.or_, masks), False)
