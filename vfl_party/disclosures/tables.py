"""Sums of what has left as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from vfl_common.text import aligned
from vfl_party.record.history import Sum
from vfl_party.record.lines import Way

_NUMBERS = ("bundles", "people", "numbers", "of the person", "bytes")
_HEAD = (
    "run",
    "to",
    "phase",
    "exchange",
    "kind",
    "bundles",
    "people",
    "numbers",
    "of the person",
    "bytes",
    "as",
)


def table(sums: Mapping[tuple[str, str, Way], Sum]) -> list[str]:
    """Returns a line for each receiver and exchange of a run, below a line of names; with the
    numbers of the person if one was asked for.
    """
    rows = [
        (
            run,
            to,
            way.phase,
            way.exchange,
            way.kind,
            f"{each.bundles:,}",
            f"{each.people:,}",
            f"{each.numbers:,}",
            "" if each.of_person is None else f"{each.of_person:,}",
            f"{each.payload_bytes:,}",
            "; ".join(part for part in (way.chain, way.how) if part),
        )
        for (run, to, way), each in sums.items()
    ]
    asked = any(each.of_person is not None for each in sums.values())
    kept = [place for place, name in enumerate(_HEAD) if asked or name != "of the person"]
    return aligned(([row[place] for place in kept] for row in (_HEAD, *rows)), _NUMBERS)
