"""Summarizes rehearsals: a sentence for each recipe, and a table that compares several recipes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from vfl.leak_meter.report.result import AttackLine, Rehearsed, rank_assets
from vfl.report.table import format_size, new_table

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
