"""Finds the formats of numbers and dates in cells of text, and reads such cells.

The formats depend only on the first rows (``SAMPLE``), not on the sizes of blocks. If later rows of
a column do not fit its format, the format is found again from the first rows and these later rows.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.errors import InputError
from vfl_party.data import checks
from vfl_party.data.stream import NUMBER, all_true, mask_numbers, strip_mark, trim

_DAY_S, _A_SECOND = 86_400.0, {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


_TIMES = ("", " %H:%M", " %H:%M:%S")


_PLAIN_DATES, _DAY_FIRST, _MONTH_FIRST = (
    tuple(date + time for date in dates for time in _TIMES)
    for dates in (("%d.%m.%Y", "%Y/%m/%d"), ("%d/%m/%Y", "%d-%m-%Y"), ("%m/%d/%Y", "%m-%d-%Y"))
)


@dataclass(frozen=True)
class Dates:
    """A column of dates or times, read as days since 1970-01-01.

    Args:
        form: The format for strptime; '' for ISO 8601.
        zoned: Whether ISO times have a time zone.
        marked: Whether numbers of the source are marked, see ``Numbers``.
    """

    form: str = ""
    zoned: bool = False
    marked: bool = False

    def read(self, text: pa.Array) -> pa.Array | None:
        """Converts cells to days, float64 [B], null if missing. Returns None if a cell is not a
        date of this format.
        """
        if not self.form:
            text = trim(text)
            with contextlib.suppress(pa.ArrowInvalid):
                return to_days(pc.cast(text, pa.timestamp("us", "UTC" if self.zoned else None)))
            return None
        fits = self.fits(text)
        return to_days(self._parse_times(text)) if all_true(fits) else None

    def fits(self, text: pa.Array) -> pa.Array:
        """Returns for each cell whether it is a date of this format, bool [B], null if missing."""
        text = trim(strip_mark(text) if self.marked else text)
        times = self._parse_times(text)
        is_same = pc.equal(_simplify(pc.strftime(times, format=self.form)), _simplify(text))
        # For %Y, strptime also accepts a year of two digits.
        if "%Y" in self.form:
            is_same = pc.and_(is_same, pc.greater_equal(pc.year(times), 1000))
        return pc.if_else(
            pc.is_valid(text), pc.fill_null(is_same, False), pa.scalar(None, pa.bool_())
        )

    def _parse_times(self, text: pa.Array) -> pa.Array:
        cells = trim(strip_mark(text) if self.marked else text)
        return pc.strptime(cells, format=self.form, unit="s", error_is_null=True)


def find_dates(source: str, name: str, text: pa.Array) -> Dates | None:
    """Returns the format of a column's dates; None if the cells are not dates. Raises InputError if
    day and month cannot be distinguished.
    """
    is_iso = pc.match_substring_regex(trim(text), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:$|[T ])")
    for form_of_iso in (Dates(), Dates(zoned=True)) if all_true(is_iso) else ():
        if form_of_iso.read(text) is not None:
            return form_of_iso
    if not all_true(
        pc.match_substring_regex(trim(text), r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(?: |$)")
    ):
        return None
    for form in _PLAIN_DATES:
        if _has_four_digit_years(form, text) and Dates(form).read(text) is not None:
            return Dates(form)
    formats = [
        next(
            (
                form
                for form in forms
                if _has_four_digit_years(form, text) and Dates(form).read(text) is not None
            ),
            None,
        )
        for forms in (_DAY_FIRST, _MONTH_FIRST)
    ]
    if all(formats):
        raise checks.unusable(
            source,
            f"column {name!r} holds dates whose day and month cannot be told apart. Set data.dates "
            f'to "{formats[0]}" or "{formats[1]}".',
        )
    found_form = formats[0] or formats[1]
    return Dates(found_form) if found_form else None


def _has_four_digit_years(form: str, text: pa.Array) -> bool:
    """Returns whether the year has four digits in every cell, because strptime also accepts one
    digit.
    """
    pattern = r"^[0-9]{4}[./-]" if form.startswith("%Y") else r"[./-][0-9]{4}(?: |$)"
    return all_true(pc.match_substring_regex(trim(text), pattern))


def make_mixed_error(source: str, name: str, form: str) -> InputError:
    """Returns the error for a column of dates (``data.dates``) with some cells that are not
    dates.
    """
    return checks.unusable(
        source,
        f"data.dates = {form!r} fits most cells of column {name!r}, but not all. Correct the other "
        "cells, or drop the column.",
    )


def to_days(times: pa.Array) -> pa.Array:
    """Converts dates and times to days since 1970-01-01, float64."""
    kind = times.type
    if pa.types.is_date32(kind):
        return pc.cast(pc.cast(times, pa.int32()), pa.float64())
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    return pc.divide(
        pc.cast(pc.cast(times, pa.int64()), pa.float64(), safe=False), _DAY_S * _A_SECOND[unit]
    )


def _simplify(text: pa.Array) -> pa.Array:
    """Returns dates in lower case without leading zeros. Comparing them before and after strptime
    finds invalid dates, because strptime turns 31 February into 2 March.
    """
    return pc.replace_substring_regex(pc.utf8_lower(text), "(^|[^0-9])0+([0-9])", r"\1\2")


def look_like_dates(words: pa.Array) -> pa.Array:
    """Returns whether each text has the shape of a date: digits separated by dots, slashes or
    dashes.
    """
    matches = pc.match_substring_regex(
        trim(words), r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(?:[ T].*)?$"
    )
    return pc.fill_null(matches, False)


# The number of first rows from which the formats are found.
SAMPLE = 10_000
# Signs next to a number. A sign is dropped if all cells of a column have it.
SIGNS = ("%", "€", "$", "£", "¥", "₹", "EUR", "USD", "CHF", "GBP")
# Spaces between thousands: the plain, no-break, narrow no-break and thin space.
_SPACES = " \u00a0\u202f\u2009"
# Regular expressions of the characters that people write as each thousands separator.
_SEPARATOR_PATTERNS = {" ": f"[{_SPACES}]", "'": "['\u2019\u2032`\u00b4]"}


@dataclass(frozen=True)
class Style:
    """A style of writing numbers: the decimal separator, and the thousands separator ('' for
    none).
    """

    decimal: str = "."
    thousands: str = ""

    @property
    def description(self) -> str:
        """A description such as "a decimal comma and spaces between thousands"."""
        separator_texts = {
            "": "",
            " ": " and spaces between thousands",
            "'": " and ' between thousands",
        }
        default = f" and {self.thousands!r} between thousands"
        kind = "comma" if self.decimal == "," else "point"
        return f"a decimal {kind}{separator_texts.get(self.thousands, default)}"


PLAIN = Style()
_STYLES = tuple(Style(*signs) for signs in (",.", ", ", ".,", ". ", ".'", ",'"))


@dataclass(frozen=True)
class Numbers:
    """The format of a column of numbers.

    Args:
        style: The style of the numbers.
        sign: The sign that is dropped from each number, such as %; '' for none.
        marked: Whether cells that were numbers in the source begin with ``NUMBER``.
    """

    style: Style = PLAIN
    sign: str = ""
    marked: bool = False

    def read(self, text: pa.Array) -> pa.Array | None:
        """Converts cells to float64 [B], null if missing. Returns None if a cell is not a
        number.
        """
        if self.marked:
            numbers = Numbers(self.style, self.sign).read(mask_numbers(text))
            is_number = pc.fill_null(pc.starts_with(text, NUMBER), False)
            # A column with the text 7% and the number 0.05 is ambiguous.
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
            unsigned = _strip_sign(text, self.sign)
            if pc.any(pc.equal(unsigned, text)).as_py():
                return None
            text = unsigned
        if self.style != PLAIN:
            if not all_true(pc.match_substring_regex(text, _make_pattern(self.style))):
                return None
            text = _normalize_numbers(text, self.style)
        try:
            return pc.cast(text, pa.float64())
        except pa.ArrowInvalid:
            return None


@dataclass(frozen=True)
class Words:
    """The format of a column of categories."""


Reading = Numbers | Dates | Words


class Points:
    """Finds ambiguous numbers such as 1.234: the point may separate thousands if no number of the
    table has a clear decimal point.
    """

    def __init__(self, source: str) -> None:
        self._source, self._ambiguous_column, self._has_clear_point = source, "", False

    def examine(self, name: str, text: pa.Array, reading: Numbers) -> None:
        """Examines cells of a column of numbers."""
        if self._has_clear_point:
            return
        text = _strip_sign(mask_numbers(text), reading.sign)
        pointed = text.filter(pc.match_substring(text, "."))
        if len(pointed):
            self._has_clear_point = not all_true(
                pc.match_substring_regex(pointed, r"^[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})$")
            )
            self._ambiguous_column = self._ambiguous_column or name

    def decide(self) -> None:
        """Raises InputError if a column has ambiguous numbers, and no number has a clear decimal
        point.
        """
        if self._ambiguous_column and not self._has_clear_point:
            raise _ambiguous_numbers(self._source, self._ambiguous_column, "point", ".")


@dataclass(frozen=True)
class Findings:
    """The format of each column of a table.

    Args:
        readings: The format of each column.
        style: The style of the numbers.
        notes: Notes for people.
        points: Finds ambiguous numbers; None if a point can only be a decimal point.
        marked: Whether numbers of the source are marked, see ``Numbers``.
    """

    readings: Mapping[str, Reading]
    style: Style = PLAIN
    notes: tuple[str, ...] = field(default=())
    points: Points | None = None
    marked: bool = False


def find_formats(
    source: str,
    sample: Mapping[str, pa.Array],
    settings: DataSettings,
    *,
    commas: bool,
    marked: bool = False,
    words: Collection[str] = (),
) -> Findings:
    """Finds the format of each column from its first cells.

    Args:
        source: The name of the table, for errors.
        sample: For each column, its first cells as text.
        settings: The settings of the table.
        commas: Whether commas separate the cells of the table.
        marked: Whether numbers of the source are marked, see ``Numbers``.
        words: Columns whose later cells have shown that they hold categories.

    Raises InputError if numbers or dates are ambiguous and no setting decides.
    """
    style, notes = _find_style(
        source, {name: mask_numbers(text) for name, text in sample.items()}, settings, commas=commas
    )
    readings: dict[str, Reading] = {}
    signs: dict[str, list[str]] = {}
    for name, text in sample.items():
        reading = (
            None
            if name in words
            else _find_reading(source, name, text, style, settings, marked=marked)
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
    notes += note_codes({name: trim(strip_mark(sample[name])) for name in numbers})
    is_decided = commas or settings.decimal is not None or settings.thousands is not None
    points = Points(source) if style == PLAIN and not is_decided else None
    return Findings(readings, style, tuple(notes), points, marked)


def _require_forms(source: str, readings: Mapping[str, Reading], settings: DataSettings) -> None:
    """Raises InputError if a format of ``data.dates`` does not fit the cells that it is for."""
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


def _find_reading(
    source: str, name: str, text: pa.Array, style: Style, settings: DataSettings, *, marked: bool
) -> Reading | None:
    """Returns the format of a column; None for categories. The format of ``data.dates`` is tried
    before numbers, for dates such as 20240131.
    """
    is_role = name in (settings.label, *settings.beside)
    form = settings.date_form(name)
    if form is None or is_role:
        return _find_numbers(text, style, marked) or (
            None if is_role else find_dates(source, name, text)
        )
    dates = Dates(form, marked=marked)
    fits = dates.fits(text)
    wrong_count, right_count = pc.sum(pc.invert(fits)).as_py() or 0, pc.sum(fits).as_py() or 0
    if right_count > wrong_count > 0:
        raise make_mixed_error(source, name, form)
    if right_count and not wrong_count:
        return dates
    reading: Reading | None = _find_numbers(text, style, marked)
    # A table may have dates of several forms.
    if reading is None:
        # If day and month cannot be distinguished, the cells are categories, and a note says so.
        with contextlib.suppress(InputError):
            reading = find_dates(source, name, text)
    return reading


def _make_pattern(style: Style) -> str:
    """Returns a regular expression for numbers of a style, with or without thousands separators."""
    between = _SEPARATOR_PATTERNS.get(style.thousands, re.escape(style.thousands))
    # The first group does not begin with 0, because nobody writes 0,513 for 513.
    groups = f"[1-9][0-9]{{0,2}}(?:{between}[0-9]{{3}})+|" if style.thousands else ""
    # Indian numbers have groups such as 1,23,456.
    groups += (
        f"[1-9][0-9]?(?:{between}[0-9]{{2}})+{between}[0-9]{{3}}|" if style.thousands == "," else ""
    )
    decimal = re.escape(style.decimal)
    return f"^[+-]?(?:(?:{groups}[0-9]+)(?:{decimal}[0-9]*)?|{decimal}[0-9]+)(?:[eE][+-]?[0-9]+)?$"


def _normalize_numbers(text: pa.Array, style: Style) -> pa.Array:
    if style.thousands:
        between = _SEPARATOR_PATTERNS.get(style.thousands, re.escape(style.thousands))
        text = pc.replace_substring_regex(text, between, "")
    return pc.replace_substring(text, style.decimal, ".") if style.decimal != "." else text


def _find_sign(text: pa.Array) -> str:
    """Returns the sign that every cell begins or ends with; '' if there is none."""
    present = pc.drop_null(trim(text))
    first = present[0].as_py() if len(present) else ""
    for sign in SIGNS:
        if sign in first and all_true(
            pc.match_substring_regex(present, f"^[+-]?{re.escape(sign)}|{re.escape(sign)}$")
        ):
            return sign
    return ""


def _find_numbers(text: pa.Array, style: Style, marked: bool) -> Numbers | None:
    for numbers in (
        Numbers(style, marked=marked),
        Numbers(style, _find_sign(mask_numbers(text)), marked),
    ):
        if numbers.read(text) is not None:
            return numbers
    return None


def _find_style(
    source: str, sample: Mapping[str, pa.Array], settings: DataSettings, *, commas: bool
) -> tuple[Style, list[str]]:
    """Returns the style that fits the most columns, the plain style in a tie, and notes for
    people.
    """
    styles = _list_styles(settings)
    unsigned = {name: _strip_sign(text, _find_sign(text)) for name, text in sample.items()}
    unread = [name for name, text in unsigned.items() if Numbers(styles[0]).read(text) is None]
    if not unread:
        return styles[0], []
    columns_by_style = {style: _read_columns(unsigned, style) for style in styles}
    max_columns = max(map(len, columns_by_style.values()))
    best_styles = [
        style for style, columns in columns_by_style.items() if len(columns) == max_columns
    ]
    chosen = best_styles[0]
    like = settings.like
    chosen = next(
        (style for style in best_styles if like is not None and style.decimal == like[0]), chosen
    )
    other = next((style for style in best_styles if style.decimal != chosen.decimal), chosen)
    ambiguous = [
        name
        for name, values in columns_by_style[chosen].items()
        if not values.equals(columns_by_style[other].get(name, values))
    ]
    if ambiguous and (like is None or like[0] != chosen.decimal):
        if not commas:
            raise _ambiguous_numbers(source, ambiguous[0], "comma", ",")
        # A file separated by commas mostly has English numbers.
        chosen = chosen if chosen.decimal == "." else other
    names = [name for name in unread if name in columns_by_style[chosen]]
    if not names:
        return chosen, []
    examples = checks.list_names(sorted(names), max_names=3)
    notes = [
        f"numbers are read with {chosen.description}, as in {examples}. To change this, set "
        "data.decimal and data.thousands."
    ]
    misread = [
        name
        for name in unsigned
        if name not in unread
        and _has_other_values(unsigned[name], styles[0], columns_by_style[chosen].get(name))
    ]
    if misread:
        notes.append(
            f"{checks.list_names(misread)} are different numbers with {styles[0].description}. "
            "Check them, and set data.decimal and data.thousands."
        )
    return chosen, notes


def _list_styles(settings: DataSettings) -> list[Style]:
    """Returns the styles that the settings allow, the simplest style first."""
    decimal, thousands = settings.decimal, settings.thousands
    if decimal is not None and thousands is not None:
        return [Style(decimal, thousands)]
    styles = (PLAIN, Style(",", ""), *_STYLES)
    return [
        style
        for style in styles
        if decimal in (None, style.decimal) and thousands in (None, style.thousands)
    ]


def _has_other_values(text: pa.Array, style: Style, values: pa.Array | None) -> bool:
    """Returns whether cells have other values than ``values`` if they are read in ``style``."""
    return values is not None and not values.equals(Numbers(style).read(text))


def _read_columns(columns: Mapping[str, pa.Array], style: Style) -> dict[str, pa.Array]:
    readings = {name: Numbers(style).read(text) for name, text in columns.items()}
    return {name: values for name, values in readings.items() if values is not None}


def _strip_sign(text: pa.Array, sign: str) -> pa.Array:
    """Removes a sign and white space from the ends of cells."""
    mark = re.escape(sign)
    # The sign may follow a minus, as in -€5.
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
    """Returns the cells that do not fit the format ``reading``."""
    present = pc.drop_null(trim(mask_numbers(text)))
    return present.filter(
        pc.invert(
            pc.match_substring_regex(
                _strip_sign(present, reading.sign), _make_pattern(reading.style)
            )
        )
    )


def look_like_numbers(words: pa.Array) -> pa.Array:
    """Returns whether each text is a number in any style, with or without a sign."""
    present = trim(words)
    # Accountants write negative numbers in parentheses.
    present = pc.replace_substring_regex(present, r"^\((.*)\)$", r"-\1")
    present = pc.replace_substring_regex(present, "^(?:\u2212|\u2013)|-$", "")
    sign = "|".join(map(re.escape, SIGNS))
    unsigned = pc.replace_substring_regex(present, f"^(?:{sign})\\s*|\\s*(?:{sign})$", "")
    masks = [
        pc.match_substring_regex(unsigned, _make_pattern(style)) for style in (PLAIN, *_STYLES)
    ]
    return pc.fill_null(functools.reduce(pc.or_, masks), False)


# Codes such as 01067 and 12E3. A spreadsheet would write a number as 1.2E+04, not as 12E3.
_ZEROS, _EXPONENT = "^0[0-9]+$", "^[0-9]+[eE][0-9]+$"


_DAY = "^(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])$"


def note_codes(numbers: Mapping[str, pa.Array]) -> Iterator[str]:
    """Yields notes about columns of numbers that may hold codes or days. ``numbers``: For each
    column, its first cells as text, null if missing.
    """
    zero_columns, exponent_columns, day_columns = (
        [name for name, text in numbers.items() if test(text)]
        for test in (
            partial(_any_matches, _ZEROS),
            partial(_any_matches, _EXPONENT),
            _are_mostly_days,
        )
    )
    if zero_columns:
        yield (
            f"numbers of {checks.list_names(zero_columns)} begin with 0, as postcodes and codes "
            "do. If they are codes, list the column in data.categorical."
        )
    if exponent_columns:
        yield (
            f"numbers of {checks.list_names(exponent_columns)} are written like 12E3, as some "
            "codes are. If they are codes, list the column in data.categorical."
        )
    if day_columns:
        yield (
            f"numbers of {checks.list_names(day_columns)} look like days such as 20240131. To read "
            "them "
            'as days, set data.dates = "%Y%m%d".'
        )


def _any_matches(pattern: str, text: pa.Array) -> bool:
    return pc.any(pc.match_substring_regex(text, pattern)).as_py() is True


def _are_mostly_days(text: pa.Array) -> bool:
    share: float | None = pc.mean(
        pc.cast(pc.match_substring_regex(text, _DAY), pa.float64())
    ).as_py()
    return share is not None and share > 0.5
