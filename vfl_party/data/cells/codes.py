"""Notes columns of numbers that may be codes (leading zeros, an E) or days such as 20240131."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data import checks

# 01067 and 12E3; a spreadsheet writes the number as 1.2E+04.
_ZEROS, _EXPONENT = "^0[0-9]+$", "^[0-9]+[eE][0-9]+$"
_DAY = "^(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12][0-9]|3[01])$"


def note_codes(numbers: Mapping[str, pa.Array]) -> Iterator[str]:
    """Yields notes about columns of numbers that may hold codes or days, by their first cells as
    they are written; null is missing.
    """
    zeros, exponents, days = (
        [name for name, text in numbers.items() if test(text)]
        for test in (partial(_some, _ZEROS), partial(_some, _EXPONENT), _mostly_days)
    )
    if zeros:
        yield (
            f"numbers of {checks.list_names(zeros)} begin with 0, as postcodes and codes do. If "
            "they are codes, list the column in data.categorical."
        )
    if exponents:
        yield (
            f"numbers of {checks.list_names(exponents)} are written like 12E3, as some codes are. "
            "If they are codes, list the column in data.categorical."
        )
    if days:
        yield (
            f"numbers of {checks.list_names(days)} look like days such as 20240131. To read them "
            'as days, set data.dates = "%Y%m%d".'
        )


def _some(pattern: str, text: pa.Array) -> bool:
    return pc.any(pc.match_substring_regex(text, pattern)).as_py() is True


def _mostly_days(text: pa.Array) -> bool:
    share: float | None = pc.mean(
        pc.cast(pc.match_substring_regex(text, _DAY), pa.float64())
    ).as_py()
    return share is not None and share > 0.5
