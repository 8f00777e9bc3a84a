"""Finds the format of dates and times that people have written, and converts them to days."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.errors import InputError
from vfl_party.data import checks
from vfl_party.data.cells.texts import all_true, strip_mark, trim

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
