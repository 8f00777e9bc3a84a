"""Renders the tables of the leak meter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import click
from rich.console import Group, RenderableType
from rich.text import Text

from vfl.summary.table import format_size, new_table, wide_console
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_atomic
from vfl_common.text import to_json
from vfl_leaks.result import REHEARSAL, AttackLine, Rehearsed, Spread, rank_assets
from vfl_leaks.result import as_json as written

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


# Leaks above _ALL are reported as complete, and below _LITTLE as almost nothing, on a scale from
# chance (0) to a complete leak (1).
_ALL, _LITTLE = 0.99, 0.05


def summarize_results(results: Sequence[Rehearsed]) -> Iterator[RenderableType]:
    """Yields a sentence for each recipe with figures, and a table if there are several recipes."""
    for result in results:
        sentence = "; ".join(_describe_leak(line) for line in _find_strongest(result))
        if sentence:
            yield Text(
                f"{result.name}: {sentence}." if len(results) > 1 else f"In short: {sentence}.",
                style="bold",
            )
    yield Text()
    if len(results) > 1:
        yield _compare_recipes(results)
        yield Text()


def _find_strongest(result: Rehearsed) -> list[AttackLine]:
    """Returns the line of the strongest attack for each target. Among equal attacks, it prefers an
    attack without additional knowledge.

    Values of different units cannot be compared, so the unit with the largest excess over chance is
    chosen.
    """
    lines = [line for line in result.worst if not line.detail]
    strongest = []
    for target in dict.fromkeys(line.of for line in lines):
        candidates = [line for line in lines if line.of == target]
        unit = max(candidates, key=lambda line: round(line.excess, 2)).unit
        strongest.append(max((line for line in candidates if line.unit == unit), key=_strength))
    return strongest


def _strength(line: AttackLine) -> tuple[float, bool]:
    value = round(line.value.mean, 2)
    return -value if line.is_error else value, line.knows.startswith("nothing")


def _describe_leak(line: AttackLine) -> str:
    bound = "at most" if line.is_error else "at least"
    how = f"{line.unit} {line.value.mean:.2f} by {line.attack}" + (
        f" from {line.place}" if line.place else ""
    )
    if line.floor > _ALL and not line.is_error:
        return (
            f"{line.of}: {line.attack} cannot be distinguished from chance (batches are too small, "
            "or of one class)"
        )
    if line.excess < _LITTLE:
        return f"{line.of}: our attacks read almost nothing beyond chance ({how})"
    if line.of == "labels" and line.excess >= _ALL:
        return (
            f"labels: {line.attack} reads all ({line.unit} {line.value.mean:.2f}, known: "
            f"{line.knows})"
        )
    known = f", known: {line.knows}" if line.knows else ""
    return f"{line.of}: {bound} {how}{known}"


def _compare_recipes(results: Sequence[Rehearsed]) -> RenderableType:
    """Returns a table with a column for each recipe. Its rows are the metric, the loss of the
    metric against the first recipe, the bytes sent, and each attack.
    """
    table = new_table("Recipes compared; the worst leaks first")
    for heading in ("attack", "attacker", "reads", "knows"):
        table.add_column(heading)
    for result in results:
        table.add_column(result.name, justify="right")
    reference = results[0].utility
    metric = results[0].metric or "metric"
    utilities = [
        result.utility if result.metric == results[0].metric else None for result in results
    ]
    table.add_row(
        metric, "", "", "", *("" if value is None else f"{value.mean:.3f}" for value in utilities)
    )
    if reference is not None:
        lost = (
            "" if value is None else f"{reference.mean - value.mean:+.3f}" for value in utilities
        )
        table.add_row(f"lost against {results[0].name}", "", "", "", *lost)
    table.add_row(
        "bytes sent",
        "",
        "",
        "",
        *(format_size(result.payload_bytes) for result in results),
        end_section=True,
    )
    for asset in rank_assets(results):
        attack, attacker, of, knows, unit = asset
        lines = [
            next((line for line in result.worst if line.asset == asset), None) for result in results
        ]
        cells = ("" if line is None else f"{unit} {line.value.mean:.3f}" for line in lines)
        table.add_row(attack, attacker, of, knows, *cells)
    return table


T = TypeVar("T")


def show_leaks(results: Sequence[Rehearsed], *, as_json: bool, out: Path | None) -> None:
    """Prints the results. With ``out``, also writes leaks.json, leaks.png and pictures of private
    images to this folder. Only their owner may read the pictures of private images.
    """
    if as_json:
        click.echo(to_json(written(results), compact=True))
    else:
        wide_console(WIDTH).print(render(results))
    if out is not None:
        from vfl_leaks.picture import draw, draw_images

        write_atomic(out / "leaks.json", to_json(written(results)) + "\n")
        written_to = [out / "leaks.json"]
        if any(result.lines for result in results):
            draw(results).savefig(out / "leaks.png", dpi=130)
            written_to.append(out / "leaks.png")
        for name, png in draw_images(results).items():
            with private_file(out / name) as file:
                file.write(png)
            written_to.append(out / name)
        if not as_json:
            click.echo("\n".join(map(str, written_to)))


def read_list(text: str | None, option: str, parse_item: Callable[[str], T]) -> Sequence[T] | None:
    """Parses a list such as ``a,b``; None stays None. Raises InputError."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        items = [parse_item(word) for word in words]
    except ValueError:
        items = []
    if not items:
        example = "1,2,3" if parse_item is int else "norm,cosine"
        raise InputError(
            Code.CONFIG_INVALID,
            f"{option}: is not a valid list (got {text!r}). Give a list such as {example}.",
        )
    return items
