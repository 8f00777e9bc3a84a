"""Sums of what has left as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vfl_common.text import LINE, clean
from vfl_party.record.history import Sum
from vfl_party.record.lines import Way

_HEAD = ("run", "to", "phase", "exchange", "kind", "bundles", "people", "numbers", "bytes", "as")


def table(sums: Mapping[tuple[str, str, Way], Sum]) -> list[str]:
    """Returns a line for each receiver and exchange of a run, below a line of names."""
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
            f"{each.payload_bytes:,}",
            "; ".join(part for part in (way.chain, way.how) if part),
        )
        for (run, to, way), each in sums.items()
    ]
    return _aligned([_HEAD, *rows])


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    made = [tuple(clean(cell, LINE) for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*made, strict=True)]
    numbers = {_HEAD.index(name) for name in ("bundles", "people", "numbers", "bytes")}
    return [
        "  ".join(
            cell.rjust(width) if place in numbers else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in made
    ]
