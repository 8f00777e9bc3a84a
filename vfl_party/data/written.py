"""Cells that a person wrote as text: finds out how a table writes numbers and dates, and reads them.

What is found is found from the first rows alone (``SAMPLE``), so that it does not depend on how the table is cut into
blocks. A column that later rows contradict is looked at again, with these rows.
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
from vfl_party.data.codes import perhaps_none
from vfl_party.data.stream import NUMBER

SAMPLE = 10_000  # rows
MISSING = pa.array(  # in a column of numbers or dates
    ("", "NA", "N/A", "n/a", "na", "#N/A", "NaN", "nan", "NAN", "null", "NULL", "None", "none", "?", "-"),
    pa.string(),
)
SIGNS = ("%", "€", "$", "£", "¥", "₹", "EUR", "USD", "CHF", "GBP")  # at a number; dropped if all of a column have one
_SPACES = " \u00a0\u202f\u2009"  # plain, no-break, narrow and thin: between thousands
_BETWEEN = {" ": f"[{_SPACES}]", "'": "['\u2019\u2032`\u00b4]"}  # what people type for it
_DAY_S, _A_SECOND = 86_400.0, {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_TIMES = ("", " %H:%M", " %H:%M:%S")
_PLAIN_DATES, _DAY_FIRST, _MONTH_FIRST = (
    tuple(date + time for date in dates for time in _TIMES)
    for dates in (("%d.%m.%Y", "%Y/%m/%d"), ("%d/%m/%Y", "%d-%m-%Y"), ("%m/%d/%Y", "%m-%d-%Y"))
)


@dataclass(frozen=True)
class Style:
    """How numbers are written: the decimal point, and what may stand between thousands ('' for nothing)."""

    decimal: str = "."
    thousands: str = ""

    @property
    def said(self) -> str:
        between = {"": "", " ": " and spaces between thousands", "'": " and ' between thousands"}
        default = f" and {self.thousands!r} between thousands"
        kind = "comma" if self.decimal == "," else "point"
        return f"a decimal {kind}{between.get(self.thousands, default)}"


PLAIN = Style()
_STYLES = tuple(Style(*each) for each in (",.", ", ", ".,", ". ", ".'", ",'"))


@dataclass(frozen=True)
class Numbers:
    """A column of numbers.

    sign: what is dropped from each of them, such as %. marked: whether cells that were numbers have ``NUMBER`` before
    them.
    """

    style: Style = PLAIN
    sign: str = ""
    marked: bool = False

    def read(self, text: pa.Array) -> pa.Array | None:
        """Returns float64, null if missing; None if some cell is no number."""
        if self.marked:
            found = Numbers(self.style, self.sign).read(unmarked(text))
            is_number = pc.fill_null(pc.starts_with(text, NUMBER), False)
            if self.sign and pc.any(is_number).as_py():  # 7% beside a cell that holds 0.05
                return None
            given = pc.if_else(is_number, pc.utf8_slice_codeunits(text, 1), pa.scalar(None, text.type))
            return None if found is None else pc.if_else(is_number, pc.cast(given, pa.float64()), found)
        text = _present(text)
        if self.sign:
            bare = _without(text, self.sign)
            if pc.any(pc.equal(bare, text)).as_py():
                return None
            text = bare
        if self.style != PLAIN:
            if not _all(pc.match_substring_regex(text, _pattern(self.style))):
                return None
            text = _plainly(text, self.style)
        try:
            return pc.cast(text, pa.float64())
        except pa.ArrowInvalid:
            return None


@dataclass(frozen=True)
class Dates:
    """A column of dates or times, read as days since 1970-01-01.

    form: as for strptime; '' for ISO 8601. zoned: whether ISO times have a zone. marked: see ``Numbers``.
    """

    form: str = ""
    zoned: bool = False
    marked: bool = False

    def read(self, text: pa.Array) -> pa.Array | None:
        """Returns float64, null if missing; None if some cell is no date of this form."""
        if not self.form:
            text = _present(text)
            with contextlib.suppress(pa.ArrowInvalid):
                return days(pc.cast(text, pa.timestamp("us", "UTC" if self.zoned else None)))
            return None
        fits = self.fits(text)
        return days(self._times(text)) if _all(fits) else None

    def fits(self, text: pa.Array) -> pa.Array:
        """Returns for each cell whether it is a date of this form, null if it is missing."""
        text = _present(plain(text) if self.marked else text)
        times = self._times(text)
        same = pc.equal(_bare(pc.strftime(times, format=self.form)), _bare(text))
        if "%Y" in self.form:  # strptime takes a year of two digits, too
            same = pc.and_(same, pc.greater_equal(pc.year(times), 1000))
        return pc.if_else(pc.is_valid(text), pc.fill_null(same, False), pa.scalar(None, pa.bool_()))

    def _times(self, text: pa.Array) -> pa.Array:
        cells = _present(plain(text) if self.marked else text)
        return pc.strptime(cells, format=self.form, unit="s", error_is_null=True)


@dataclass(frozen=True)
class Words:
    """A column of categories."""


Reading = Numbers | Dates | Words


class Points:
    """Looks whether numbers such as 1.234 can be read in two ways: nothing in the whole table shows a decimal point."""

    def __init__(self, source: str) -> None:
        self._source, self._grouped, self._shown = source, "", False

    def look(self, name: str, text: pa.Array, reading: Numbers) -> None:
        """Looks at some cells of a column of numbers."""
        if self._shown:
            return
        text = _without(unmarked(text), reading.sign)
        pointed = text.filter(pc.match_substring(text, "."))
        if len(pointed):
            self._shown = not _all(pc.match_substring_regex(pointed, r"^[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})$"))
            self._grouped = self._grouped or name

    def decide(self) -> None:
        """Raises InputError if a column has such numbers, and none has others with a point."""
        if self._grouped and not self._shown:
            raise _two_ways(self._source, self._grouped, "point", ".")


@dataclass(frozen=True)
class Findings:
    """How each column is read.

    style: of the numbers; notes: sentences for people; points: None if a point can only be the decimal one; marked: see
    ``Numbers``.
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
    """Finds out how columns are to be read, from their first cells.

    commas: whether the table separates cells by commas; marked: see ``Numbers``; words: the columns that later rows
    show to be categories. Raises InputError if numbers or dates
    can be read in two ways and no setting says which.
    """
    style, notes = _style(source, {name: unmarked(text) for name, text in sample.items()}, settings, commas=commas)
    readings: dict[str, Reading] = {}
    signs: dict[str, list[str]] = {}
    for name, text in sample.items():
        reading = None if name in words else _reading(source, name, text, style, settings, marked=marked)
        readings[name] = reading or Words()
        if isinstance(reading, Numbers) and reading.sign:
            signs.setdefault(reading.sign, []).append(name)
        if isinstance(reading, Dates):
            form = f" of the form {reading.form}" if reading.form else ""
            text = f"column {name!r} holds dates{form}: read as days since 1970-01-01"
            notes.append(f"{text}; data.dates, data.categorical")
    kinds = {type(each) for each in readings.values()}
    if settings.dates is not None and readings and Dates not in kinds:
        text = f"data.dates = {settings.dates!r} fits the cells of no column"
        raise checks.unusable(source, f'{text}; write it as strptime has it, such as "%d.%m.%Y", or remove it')
    notes += [f"{sign} is dropped from the numbers of {checks.listed(names)}" for sign, names in signs.items()]
    numbers = [name for name, reading in readings.items() if isinstance(reading, Numbers)]
    notes += perhaps_none({name: _present(plain(sample[name])) for name in numbers})
    decided = commas or settings.decimal is not None or settings.thousands is not None
    points = Points(source) if style == PLAIN and not decided else None
    return Findings(readings, style, tuple(notes), points, marked)


def _reading(
    source: str, name: str, text: pa.Array, style: Style, settings: DataSettings, *, marked: bool
) -> Reading | None:
    """Returns how a column is read: dates as the settings say come before numbers, such as 20240131; None for words."""
    if settings.dates is None or name == settings.label:
        return _numbers(text, style, marked) or (_dates(source, name, text) if name != settings.label else None)
    said = Dates(settings.dates, marked=marked)
    fits = said.fits(text)
    wrong, right = pc.sum(pc.invert(fits)).as_py() or 0, pc.sum(fits).as_py() or 0
    if right > wrong > 0:
        raise not_all_dates(source, name, settings.dates)
    return said if right and not wrong else _numbers(text, style, marked)


def not_all_dates(source: str, name: str, form: str) -> InputError:
    """Returns the error for a column that is one of dates by ``data.dates``, but for some cells."""
    what = f"data.dates = {form!r} fits most cells of column {name!r}, and not all"
    return checks.unusable(source, f"{what}; correct the others, or drop the column")


def days(times: pa.Array) -> pa.Array:
    """Returns dates and times as days since 1970-01-01, float64."""
    kind = times.type
    if pa.types.is_date32(kind):
        return pc.cast(pc.cast(times, pa.int32()), pa.float64())
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    return pc.divide(pc.cast(pc.cast(times, pa.int64()), pa.float64(), safe=False), _DAY_S * _A_SECOND[unit])


def _bare(text: pa.Array) -> pa.Array:
    """Returns dates without zeros before numbers, in lower case. strptime makes 2 March of 31 February: not so here."""
    return pc.replace_substring_regex(pc.utf8_lower(text), "(^|[^0-9])0+([0-9])", r"\1\2")


def _present(text: pa.Array) -> pa.Array:
    """Returns the cells without white space at their ends, null if missing."""
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=MISSING), pa.scalar(None, trimmed.type), trimmed)


def _all(mask: pa.Array) -> bool:
    return pc.all(mask).as_py() is not False  # None: all are missing


def _pattern(style: Style) -> str:
    """Returns a regular expression of the numbers of a style; thousands may be separated, or not."""
    between = _BETWEEN.get(style.thousands, re.escape(style.thousands))
    groups = f"[1-9][0-9]{{0,2}}(?:{between}[0-9]{{3}})+|" if style.thousands else ""  # nobody writes 0,513 for 513
    groups += f"[1-9][0-9]?(?:{between}[0-9]{{2}})+{between}[0-9]{{3}}|" if style.thousands == "," else ""  # 1,23,456
    decimal = re.escape(style.decimal)
    return f"^[+-]?(?:(?:{groups}[0-9]+)(?:{decimal}[0-9]*)?|{decimal}[0-9]+)(?:[eE][+-]?[0-9]+)?$"


def _plainly(text: pa.Array, style: Style) -> pa.Array:
    if style.thousands:
        between = _BETWEEN.get(style.thousands, re.escape(style.thousands))
        text = pc.replace_substring_regex(text, between, "")
    return pc.replace_substring(text, style.decimal, ".") if style.decimal != "." else text


def _sign(text: pa.Array) -> str:
    """Returns the sign that every cell has at one of its ends, or ''."""
    present = pc.drop_null(_present(text))
    first = present[0].as_py() if len(present) else ""
    for sign in SIGNS:
        if sign in first and _all(pc.match_substring_regex(present, f"^[+-]?{re.escape(sign)}|{re.escape(sign)}$")):
            return sign
    return ""


def _numbers(text: pa.Array, style: Style, marked: bool) -> Numbers | None:
    for found in (Numbers(style, marked=marked), Numbers(style, _sign(unmarked(text)), marked)):
        if found.read(text) is not None:
            return found
    return None


def _style(
    source: str, sample: Mapping[str, pa.Array], settings: DataSettings, *, commas: bool
) -> tuple[Style, list[str]]:
    """Returns the style by which most columns are numbers; the plain one if no other has more of them."""
    fits = _fitting(settings)
    bare = {name: _without(text, _sign(text)) for name, text in sample.items()}
    odd = [name for name, text in bare.items() if Numbers(fits[0]).read(text) is None]
    if not odd:
        return fits[0], []
    read = {style: _readable(bare, style) for style in fits}
    most = max(map(len, read.values()))
    best = [style for style, columns in read.items() if len(columns) == most]
    found = best[0]
    known = settings.like
    found = next((each for each in best if known is not None and each.decimal == known[0]), found)
    other = next((each for each in best if each.decimal != found.decimal), found)
    differ = [name for name, values in read[found].items() if not values.equals(read[other].get(name, values))]
    if differ and (known is None or known[0] != found.decimal):
        if not commas:
            raise _two_ways(source, differ[0], "comma", ",")
        found = found if found.decimal == "." else other  # what stands in a file with commas is mostly English
    names = [name for name in odd if name in read[found]]
    if not names:
        return found, []
    shown = checks.listed(sorted(names), most=3)
    notes = [f"numbers are read with {found.said}, as in {shown}; data.decimal, data.thousands"]
    others = [name for name in bare if name not in odd and _differs(bare[name], fits[0], read[found].get(name))]
    if others:
        text = f"{checks.listed(others)} would be other numbers with {fits[0].said}"
        notes.append(f"{text}: look at them; data.decimal, data.thousands")
    return found, notes


def _fitting(settings: DataSettings) -> list[Style]:
    """Returns the styles that the settings allow, the plainest first."""
    decimal, thousands = settings.decimal, settings.thousands
    if decimal is not None and thousands is not None:
        return [Style(decimal, thousands)]
    styles = (PLAIN, Style(",", ""), *_STYLES)
    return [each for each in styles if decimal in (None, each.decimal) and thousands in (None, each.thousands)]


def _differs(text: pa.Array, style: Style, values: pa.Array | None) -> bool:
    """Whether cells are other numbers in a style that fits them than the ones that are read."""
    return values is not None and not values.equals(Numbers(style).read(text))


def _readable(columns: Mapping[str, pa.Array], style: Style) -> dict[str, pa.Array]:
    found = {name: Numbers(style).read(text) for name, text in columns.items()}
    return {name: values for name, values in found.items() if values is not None}


def unmarked(text: pa.Array) -> pa.Array:
    """Returns the cells that were text, null for those that were numbers."""
    return pc.if_else(pc.fill_null(pc.starts_with(text, NUMBER), False), pa.scalar(None, text.type), text)


def plain(text: pa.Array) -> pa.Array:
    """Returns the cells without the mark of numbers."""
    return pc.replace_substring_regex(text, f"^{NUMBER}", "")


def _without(text: pa.Array, sign: str) -> pa.Array:
    """Returns the cells without a sign at one of their ends, and without white space."""
    mark = re.escape(sign)
    ends = f"^([+-]?){mark}\\s*|\\s*{mark}$"  # -€5 is -5
    return pc.replace_substring_regex(_present(text), ends, r"\1") if sign else _present(text)


def _two_ways(source: str, name: str, what: str, mark: str) -> InputError:
    ways = f"with a decimal {what}, or with a {what} between thousands"
    remedy = f'set data.decimal to "{mark}" or data.thousands to "{mark}"'
    return checks.unusable(source, f"column {name!r} holds numbers that can be read in two ways: {ways}; {remedy}")


def _dates(source: str, name: str, text: pa.Array) -> Dates | None:
    iso = pc.match_substring_regex(_present(text), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:$|[T ])")
    for found in (Dates(), Dates(zoned=True)) if _all(iso) else ():
        if found.read(text) is not None:
            return found
    if not _all(pc.match_substring_regex(_present(text), r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(?: |$)")):
        return None
    for form in _PLAIN_DATES:
        if _four(form, text) and Dates(form).read(text) is not None:
            return Dates(form)
    both = [
        next((form for form in forms if _four(form, text) and Dates(form).read(text) is not None), None)
        for forms in (_DAY_FIRST, _MONTH_FIRST)
    ]
    if all(both):
        what = f"column {name!r} holds dates whose day and month cannot be told apart"
        raise checks.unusable(source, f'{what}; set data.dates to "{both[0]}" or "{both[1]}"')
    found_form = both[0] or both[1]
    return Dates(found_form) if found_form else None


def _four(form: str, text: pa.Array) -> bool:
    """Whether years have four digits in every cell: strptime takes a year of one, too."""
    place = r"^[0-9]{4}[./-]" if form.startswith("%Y") else r"[./-][0-9]{4}(?: |$)"
    return _all(pc.match_substring_regex(_present(text), place))


def unlike(text: pa.Array, reading: Numbers) -> pa.Array:
    """Returns the cells that are not written as ``reading`` says."""
    present = pc.drop_null(_present(unmarked(text)))
    return present.filter(pc.invert(pc.match_substring_regex(_without(present, reading.sign), _pattern(reading.style))))


def look_like_numbers(words: pa.Array) -> pa.Array:
    """Returns for each text whether it is a number in any style, with or without a sign."""
    present = _present(words)
    present = pc.replace_substring_regex(present, r"^\((.*)\)$", r"-\1")  # as accountants write what is owed
    present = pc.replace_substring_regex(present, "^(?:\u2212|\u2013)|-$", "")
    sign = "|".join(map(re.escape, SIGNS))
    bare = pc.replace_substring_regex(present, f"^(?:{sign})\\s*|\\s*(?:{sign})$", "")
    masks = [pc.match_substring_regex(bare, _pattern(each)) for each in (PLAIN, *_STYLES)]
    return pc.fill_null(functools.reduce(pc.or_, masks), False)


def look_like_dates(words: pa.Array) -> pa.Array:
    """Returns for each text whether it is digits with dots, slashes or dashes between them, as in dates."""
    found = pc.match_substring_regex(_present(words), r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(?:[ T].*)?$")
    return pc.fill_null(found, False)
