"""Converts cells of any type to text, as in a CSV file."""

from __future__ import annotations

import datetime
import math
import uuid
from decimal import Decimal

from vfl_party.data.stream import NUMBER

# Whole decimal numbers below this limit are written without a point.
_WHOLE = 1 << 63
# Floats below this limit represent all whole numbers exactly. Larger floats are written with an
# exponent.
_EXACT = 1 << 53


class MarkedError(ValueError):
    """A text begins with the character ``NUMBER``, which marks numbers."""

    def __init__(self) -> None:
        super().__init__(
            f"begins with the character U+{ord(NUMBER):04X}, which marks numbers here. Remove it."
        )


def write_cell(value: object) -> str | None:
    """Converts a cell to text; None if it is empty or NaN.

    Numbers are marked with ``NUMBER`` in front. Whole numbers have no point (3.0 becomes ``3``),
    and other numbers have as many digits as needed. Dates and times are written as ISO 8601. Raises
    TypeError if the type is not supported, MarkedError if a text begins with ``NUMBER``.
    """
    if value is None or isinstance(value, str):
        if value and value[0] == NUMBER:
            raise MarkedError
        return value or None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal):
        number = _write_number(value)
        return None if number is None else NUMBER + number
    # A datetime is also a date.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return _write_duration(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def _write_number(value: float | Decimal) -> str | None:
    if isinstance(value, Decimal):
        return _write_decimal(value)
    if isinstance(value, int):
        return str(value)
    whole = value.is_integer() and abs(value) < _EXACT
    return str(int(value)) if whole else None if math.isnan(value) else repr(value)


def _write_decimal(value: Decimal) -> str | None:
    if not value.is_finite():
        return None if value.is_nan() else repr(float(value))
    return str(int(value)) if abs(value) < _WHOLE and value == int(value) else f"{value:f}"


def _write_duration(value: datetime.timedelta) -> str:
    """Writes hours, minutes and seconds, as Excel shows a duration: ``30:15:00``."""
    sign, size = ("-", -value) if value < datetime.timedelta() else ("", value)
    minutes, seconds = divmod(size.days * 86_400 + size.seconds, 60)
    fraction = f".{size.microseconds:06d}" if size.microseconds else ""
    return f"{sign}{minutes // 60}:{minutes % 60:02d}:{seconds:02d}{fraction}"
