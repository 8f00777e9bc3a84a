"""Finds columns of numbers that may be codes (with leading zeros or an E) or days such as
20240131.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data import checks

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
