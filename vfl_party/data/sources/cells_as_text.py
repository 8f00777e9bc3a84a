"""Writes cells as text as in a CSV file, for tables whose cells are values of any type."""

from __future__ import annotations

import datetime
import math
import uuid
from decimal import Decimal

from vfl_party.data.stream import NUMBER

# Whole decimals below it are written without a point.
_WHOLE = 1 << 63
# Floats below it represent all whole numbers; larger ones are written with an exponent.
_EXACT = 1 << 53


class MarkedError(ValueError):
    """A text that begins with the character that marks numbers here."""

    def __init__(self) -> None:
        super().__init__(
            f"begins with the character U+{ord(NUMBER):04X}, which marks numbers here. Remove it."
        )


def write_cell(value: object) -> str | None:
    """Returns a cell as text; None if it is empty or NaN.

    ``NUMBER`` precedes numbers. Whole ones have no point (3.0 is ``3``), others as many digits as
    they need; dates and times are ISO 8601. Raises TypeError if a CSV file cannot hold the cell,
    MarkedError if a text begins with ``NUMBER``.
    """
    if value is None or isinstance(value, str):
        if value and value[0] == NUMBER:
            raise MarkedError
        return value or None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | Decimal):
        number = _number(value)
        return None if number is None else NUMBER + number
    # A datetime is a date.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return _duration(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def _number(value: float | Decimal) -> str | None:
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, int):
        return str(value)
    whole = value.is_integer() and abs(value) < _EXACT
    return str(int(value)) if whole else None if math.isnan(value) else repr(value)


def _decimal(value: Decimal) -> str | None:
    if not value.is_finite():
        return None if value.is_nan() else repr(float(value))
    return str(int(value)) if abs(value) < _WHOLE and value == int(value) else f"{value:f}"


def _duration(value: datetime.timedelta) -> str:
    """Writes hours, minutes and seconds, as Excel shows a duration: ``30:15:00``."""
    sign, size = ("-", -value) if value < datetime.timedelta() else ("", value)
    minutes, seconds = divmod(size.days * 86_400 + size.seconds, 60)
    fraction = f".{size.microseconds:06d}" if size.microseconds else ""
    return f"{sign}{minutes // 60}:{minutes % 60:02d}:{seconds:02d}{fraction}"
