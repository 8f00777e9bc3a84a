"""Dates and times as people write them: finds their format, and reads them as days."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.errors import InputError
from vfl_party.data import checks
from vfl_party.data.cells.texts import every, plain, trim

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
        form: a format of strptime; '' for ISO 8601.
        zoned: whether ISO times have a zone.
        marked: see ``Numbers``.
    """

    form: str = ""
    zoned: bool = False
    marked: bool = False

    def read(self, text: pa.Array) -> pa.Array | None:
        """Returns days, float64 [B], null if missing; None if a cell is not a date of this
        format.
        """
        if not self.form:
            text = trim(text)
            with contextlib.suppress(pa.ArrowInvalid):
                return days(pc.cast(text, pa.timestamp("us", "UTC" if self.zoned else None)))
            return None
        fits = self.fits(text)
        return days(self._times(text)) if every(fits) else None

    def fits(self, text: pa.Array) -> pa.Array:
        """Returns for each cell whether it is a date of this format, bool [B], null if missing."""
        text = trim(plain(text) if self.marked else text)
        times = self._times(text)
        same = pc.equal(_bare(pc.strftime(times, format=self.form)), _bare(text))
        # Strptime takes a year of two digits, too.
        if "%Y" in self.form:
            same = pc.and_(same, pc.greater_equal(pc.year(times), 1000))
        return pc.if_else(pc.is_valid(text), pc.fill_null(same, False), pa.scalar(None, pa.bool_()))

    def _times(self, text: pa.Array) -> pa.Array:
        cells = trim(plain(text) if self.marked else text)
        return pc.strptime(cells, format=self.form, unit="s", error_is_null=True)


def find_dates(source: str, name: str, text: pa.Array) -> Dates | None:
    """Returns the form of a column's dates; None if the cells are not dates. Raises InputError if
    day and month cannot be told apart.
    """
    iso = pc.match_substring_regex(trim(text), r"^[0-9]{4}-[0-9]{2}-[0-9]{2}(?:$|[T ])")
    for form_of_iso in (Dates(), Dates(zoned=True)) if every(iso) else ():
        if form_of_iso.read(text) is not None:
            return form_of_iso
    if not every(
        pc.match_substring_regex(trim(text), r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(?: |$)")
    ):
        return None
    for form in _PLAIN_DATES:
        if _four(form, text) and Dates(form).read(text) is not None:
            return Dates(form)
    both = [
        next(
            (form for form in forms if _four(form, text) and Dates(form).read(text) is not None),
            None,
        )
        for forms in (_DAY_FIRST, _MONTH_FIRST)
    ]
    if all(both):
        raise checks.unusable(
            source,
            f"column {name!r} holds dates whose day and month cannot be told apart. Set data.dates "
            f'to "{both[0]}" or "{both[1]}".',
        )
    found_form = both[0] or both[1]
    return Dates(found_form) if found_form else None


def _four(form: str, text: pa.Array) -> bool:
    """Returns whether years have four digits in every cell: strptime also accepts a year of one
    digit.
    """
    place = r"^[0-9]{4}[./-]" if form.startswith("%Y") else r"[./-][0-9]{4}(?: |$)"
    return every(pc.match_substring_regex(trim(text), place))


def not_all_dates(source: str, name: str, form: str) -> InputError:
    """Returns the error for a column of dates (``data.dates``) in which some cells are not."""
    return checks.unusable(
        source,
        f"data.dates = {form!r} fits most cells of column {name!r}, but not all. Correct the other "
        "cells, or drop the column.",
    )


def days(times: pa.Array) -> pa.Array:
    """Returns dates and times as days since 1970-01-01, float64."""
    kind = times.type
    if pa.types.is_date32(kind):
        return pc.cast(pc.cast(times, pa.int32()), pa.float64())
    unit = "ms" if pa.types.is_date64(kind) else kind.unit
    return pc.divide(
        pc.cast(pc.cast(times, pa.int64()), pa.float64(), safe=False), _DAY_S * _A_SECOND[unit]
    )


def _bare(text: pa.Array) -> pa.Array:
    """Returns dates in lower case without leading zeros, to compare them: strptime turns 31
    February into 2 March.
    """
    return pc.replace_substring_regex(pc.utf8_lower(text), "(^|[^0-9])0+([0-9])", r"\1\2")


def look_like_dates(words: pa.Array) -> pa.Array:
    """Returns for each text whether it has the shape of a date: digits separated by dots, slashes
    or dashes.
    """
    matches = pc.match_substring_regex(
        trim(words), r"^[0-9]{1,4}[./-][0-9]{1,2}[./-][0-9]{1,4}(?:[ T].*)?$"
    )
    return pc.fill_null(matches, False)
