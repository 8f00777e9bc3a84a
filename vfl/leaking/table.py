"""The one table of the leak meter."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from vfl.leaking.result import REHEARSAL, Line, Rehearsed, Spread
from vfl.report.table import new_table, size

_SIZES = 3  # that are shown of one exchange


def render(found: Sequence[Rehearsed]) -> Group:
    """Returns a table for each recipe, with notes below it."""
    parts: list[RenderableType] = []
    for each in found:
        utility = f"{each.metric} {each.utility}" if each.utility is not None else "no metric"
        seeds = f"{len(each.seeds)} seed{'s' if len(each.seeds) > 1 else ''}"
        table = new_table(f"{each.name}: {utility}, {size(each.payload_bytes)} sent, {seeds}")
        for heading in ("attack", "by", "reads", "knows"):
            table.add_column(heading)
        for heading in ("leak", "95 % of batches", "chance (95 %)"):
            table.add_column(heading, justify="right")
        table.add_column("without any message")
        for line in each.lines:
            table.add_row(*_cells(line))
        parts += [table, *(Text(note, style="dim") for note in each.notes), Text(), _sizes(each), Text()]
    return Group(*parts, Text(REHEARSAL, style="dim"))


def _sizes(each: Rehearsed) -> RenderableType:
    table = new_table("What sizes tell anybody on the network, although contents are encrypted")
    for heading in ("phase", "exchange", "from", "to", "payload bytes x messages", "tells"):
        table.add_column(heading)
    for line in each.sizes:
        shown = ", ".join(f"{size_:,} x {count:,}" for size_, count in line.sizes[:_SIZES])
        more = ", …" if len(line.sizes) > _SIZES else ""
        table.add_row(line.phase, line.exchange, line.sender, line.receiver, shown + more, line.tells)
    return table


def _cells(line: Line) -> tuple[str, ...]:
    chance = _of(line.chance) + (f" ({line.chance_high.mean:.3f})" if line.chance_high is not None else "")
    baselines = ", ".join(f"{name} {spread}" for name, spread in line.baselines.items())
    return (
        line.attack,
        line.attacker,
        line.of,
        line.knows,
        f"{line.unit} {line.value}",
        _of(line.high),
        chance,
        baselines,
    )


def _of(spread: Spread | None) -> str:
    return "" if spread is None else str(spread)
