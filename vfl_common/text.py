"""Text and JSON for people and other programs: peers choose some of the words and numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

# In a list for a person.
_NAMES = 8
# Characters of a name in a sentence.
_LONGEST_NAME = 80
# Characters of a line for a person, and of a text in the log.
LINE = 2_000
# The kind of phase that measures what the others have trained.
MEASURES = "evaluate"


def clean(text: str, most: int = 500) -> str:
    """Makes a peer's words one line of printable characters, so that it cannot add lines of its own
    to our output.
    """
    return "".join(c if c.isprintable() else " " for c in text[:most]).strip()


def count(number: int, what: str) -> str:
    """Words a number of things: ``1 run``, ``2 runs``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def method_of(kinds: Iterable[str]) -> str:
    """Returns the kinds of the phases that train, in order: ``fedhssl → head``."""
    found = dict.fromkeys(kinds)
    return " → ".join([kind for kind in found if kind != MEASURES] or found)


def listed(names: Sequence[str]) -> str:
    """Lists names for a person; of many, the first ones and how many more there are."""
    more = len(names) - _NAMES
    return f"{', '.join(names[:_NAMES])} and {more} more" if more > 0 else ", ".join(names)


def shortened(name: str) -> str:
    """Returns a name for a sentence: the beginning of one that is longer than anybody reads."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def printable(name: str) -> str:
    """Returns a name as it is; if it holds what cannot be seen, such as a line break, as Python
    writes it in quotes.

    Of a long one it is the beginning.
    """
    name = shortened(name)
    return name if name.isprintable() else repr(name)


def aligned(rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Returns a table as lines with aligned cells. ``rows``: the headings first; ``right``: those
    of columns of numbers, which stand at the right.
    """
    made = [tuple(clean(cell, LINE) for cell in row) for row in rows]
    head = made[0]
    widths = [max(map(len, column)) for column in zip(*made, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ).rstrip()
        for row in made
    ]


def percent(count: int, total: int) -> str:
    """Words the share that ``count`` is of ``total``; only all of them are 100 %, and only none are
    0 %.
    """
    found = round(100 * count / total) if total else 0
    if found == 0 and count:
        return "less than 1 %"
    return "more than 99 %" if found == 100 and count < total else f"{found} %"


def host_and_port(address: str) -> tuple[str, int]:
    """Returns host and port of ``host:port`` (or ``[::1]:7000``). Raises ValueError, for a person,
    if it is none.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > 65_535:
        what = "write host:port, such as 127.0.0.1:7000, with a port of at most 65535"
        raise ValueError(f"{clean(address, 100)!r} is not an address; {what}")
    return host.strip("[]"), int(port)


def to_json(value: object, *, compact: bool = False) -> str:
    """Writes JSON on one line: NaN and infinity, which JSON does not have, become null."""
    separators = (",", ":") if compact else None
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=separators)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, default=str, separators=separators)


def number(value: Any) -> float:
    """Reads a number that ``to_json`` wrote: null is NaN. Raises TypeError or ValueError if it is
    none.
    """
    return math.nan if value is None else float(value)


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _nan_for_none(value: object) -> object:
    return math.nan if value is None else value


# In a model of what peers wrote.
Words = Annotated[str, AfterValidator(lambda text: clean(text, LINE))]
# Written by ``to_json``, or as null by pydantic.
Number = Annotated[float, BeforeValidator(_nan_for_none)]
