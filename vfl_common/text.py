"""Formats text and JSON for people and other programs. Some of the text comes from peers, which are
not trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

# The maximum number of names in a list for a person.
_MAX_NAMES = 8
# The maximum length of a name in a sentence.
_MAX_NAME_CHARS = 80
# The maximum length of a line for a person, and of a text in the log.
LINE = 2_000
# The kind of the phase that evaluates the trained model.
MEASURES = "evaluate"


def clean(text: str, max_chars: int = 500) -> str:
    """Returns a peer's text as one line of printable characters, so that the peer cannot add lines
    to the output.
    """
    return "".join(c if c.isprintable() else " " for c in text[:max_chars]).strip()


def count(number: int, what: str) -> str:
    """Returns a number with its noun: ``1 run``, ``2 runs``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def describe_method(kinds: Iterable[str]) -> str:
    """Returns the kinds of the phases that train, in order: ``fedhssl → head``."""
    unique = dict.fromkeys(kinds)
    return " → ".join([kind for kind in unique if kind != MEASURES] or unique)


def list_names(names: Sequence[str]) -> str:
    """Returns names as a list for a person. A long list is cut, with the number of further
    names.
    """
    num_further = len(names) - _MAX_NAMES
    return (
        f"{', '.join(names[:_MAX_NAMES])} and {num_further} more"
        if num_further > 0
        else ", ".join(names)
    )


def shorten(name: str) -> str:
    """Returns a name for a sentence. A long name is cut."""
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[:_MAX_NAME_CHARS]}…"


def make_printable(name: str) -> str:
    """Returns a printable name unchanged. A name with other characters, such as a line break,
    becomes a quoted Python string. A long name is cut.
    """
    name = shorten(name)
    return name if name.isprintable() else repr(name)


def align_columns(rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Formats a table as lines with aligned columns. ``rows``: the rows, of which the first has the
    headings. ``right``: the headings of columns that are aligned to the right.
    """
    cells = [tuple(clean(cell, LINE) for cell in row) for row in rows]
    head = cells[0]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def format_percent(count: int, total: int) -> str:
    """Returns the share of ``count`` in ``total`` in per cent. It is 100 % only if they are equal,
    and 0 % only if ``count`` is 0.
    """
    share = round(100 * count / total) if total else 0
    if share == 0 and count:
        return "less than 1 %"
    return "more than 99 %" if share == 100 and count < total else f"{share} %"


def host_and_port(address: str) -> tuple[str, int]:
    """Splits ``host:port`` (or ``[::1]:7000``) into host and port. Raises ValueError, with a
    message for a person, if ``address`` has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > 65_535:
        raise ValueError(
            f"{clean(address, 100)!r} is not an address. Write host:port, such as 127.0.0.1:7000, "
            "with a port of at most 65535."
        )
    return host.strip("[]"), int(port)


def to_json(value: object, *, compact: bool = False) -> str:
    """Encodes a value as JSON on one line. NaN and infinity, which JSON does not have, become
    null.
    """
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=separators)
    except ValueError:
        return json.dumps(
            _replace_non_finite(value), allow_nan=False, default=str, separators=separators
        )


def number(value: Any) -> float:
    """Converts a number that ``to_json`` wrote to a float. null becomes NaN. Raises TypeError or
    ValueError if ``value`` is not a number.
    """
    return math.nan if value is None else float(value)


def _replace_non_finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan_for_none(value: object) -> object:
    return math.nan if value is None else value


# A text from a peer in a pydantic model. It is made printable.
Words = Annotated[str, AfterValidator(lambda text: clean(text, LINE))]
# A number that ``to_json`` or pydantic wrote, in a pydantic model. null is NaN.
Number = Annotated[float, BeforeValidator(_nan_for_none)]
