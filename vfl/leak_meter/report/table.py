"""Renders the tables of the leak meter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Group, RenderableType
from rich.text import Text

from vfl.leak_meter.report.compare import summarize_results
from vfl.leak_meter.report.result import REHEARSAL, AttackLine, Rehearsed, Spread
from vfl.report.table import format_size, new_table

# Minimum width of the table in characters when the output is not a terminal.
WIDTH = 140
# Maximum number of sizes that are shown for one exchange.
_SIZES = 3
_CLOCK = (
    "The times are from this rehearsal, in which all parties took turns in one process. Between "
    "machines the seconds differ, but not the positions of the pauses."
)


def render(results: Sequence[Rehearsed]) -> Group:
    """Returns a summary, and a table for each recipe with notes below it."""
    blocks: list[RenderableType] = [*summarize_results(results)]
    for result in results:
        utility = f"{result.metric} {result.utility}" if result.utility is not None else "no metric"
        seeds = f"{len(result.seeds)} seed{'s' if len(result.seeds) > 1 else ''}"
        title = f"{result.name}: {utility}, {format_size(result.payload_bytes)} sent, {seeds}"
        lines = result.worst
        places = {line.place for line in lines if line.place}
        columns = [column for column in _CELLS if column.heading != "from" or len(places) > 1]
        columns = [columns[0], *(column for column in columns[1:] if any(map(column.cell, lines)))]
        table = new_table(title)
        for column in columns:
            table.add_column(
                column.heading,
                justify=column.justify,
                no_wrap=column.whole,
                min_width=column.min_width(lines),
            )
        for line in lines:
            table.add_row(*(column.cell(line) for column in columns))
        warnings = [Text(gap, style="bold") for gap in result.gaps]
        where = [f"Columns and rows are read from {place}." for place in places if len(places) == 1]
        notes = [Text(note, style="dim") for note in (*where, *result.elsewhere, *result.notes)]
        body = table if lines else Text(f"{title}\nNo attack was played.")
        blocks += [
            body,
            *warnings,
            *notes,
            Text(),
            *([_render_sizes(result), Text()] if result.sizes else []),
        ]
        blocks += [_render_times(result), Text(_CLOCK, style="dim"), Text()] if result.times else []
    return Group(*blocks, Text(REHEARSAL, style="dim"))


def _render_sizes(result: Rehearsed) -> RenderableType:
    sampling = f" (one round in {result.every:,})" if result.every > 1 else ""
    table = new_table(
        f"What sizes of encrypted messages reveal to any observer of the network{sampling}"
    )
    for heading in ("phase", "exchange", "from", "to", "payload bytes x messages", "reveals"):
        table.add_column(heading)
    for line in result.sizes:
        sizes = ", ".join(f"{size_:,} x {count:,}" for size_, count in line.sizes[:_SIZES])
        more = ", …" if len(line.sizes) > _SIZES else ""
        table.add_row(
            line.phase, line.exchange, line.sender, line.receiver, sizes + more, line.tells
        )
    return table


def _render_times(result: Rehearsed) -> RenderableType:
    table = new_table("What times of messages reveal to any observer of the network")
    for heading in ("phase", "exchange", "from", "to"):
        table.add_column(heading)
    for heading in ("messages", "between two", "95 %"):
        table.add_column(heading, justify="right")
    table.add_column("reveals")
    for line in result.times:
        direction = (line.phase, line.exchange, line.sender, line.receiver)
        table.add_row(*direction, f"{line.messages:,}", *line.between, line.tells)
    return table


def _format_spread(spread: Spread | None) -> str:
    return "" if spread is None else str(spread)


def _format_chance(line: AttackLine) -> str:
    return _format_spread(line.chance) + (
        f" ({line.chance_high.mean:.3f})" if line.chance_high is not None else ""
    )


def _format_baselines(line: AttackLine) -> str:
    return "\n".join(f"{name} {spread}" for name, spread in line.baselines.items())


@dataclass(frozen=True)
class _Column:
    """A column of the table, which is left out if all its cells are empty. ``whole``: whether its
    cells are never wrapped.
    """

    heading: str
    cell: Callable[[AttackLine], str]
    justify: Literal["left", "right"] = "left"
    whole: bool = False

    def min_width(self, lines: Sequence[AttackLine]) -> int:
        """Returns the length of the longest word in the cells, so that no word is broken."""
        return max((len(word) for line in lines for word in self.cell(line).split()), default=0)


_CELLS = (
    _Column("attack", lambda line: line.attack, whole=True),
    _Column("attacker", lambda line: line.attacker),
    _Column("reads", lambda line: line.of),
    _Column("from", lambda line: line.place, whole=True),
    _Column("knows", lambda line: line.knows),
    _Column("leak", lambda line: f"{line.unit} {line.value}", "right", whole=True),
    _Column("95 % of batches", lambda line: _format_spread(line.high), "right"),
    _Column("chance (95 %)", _format_chance, "right", whole=True),
    _Column("without any message", _format_baselines, whole=True),
)
