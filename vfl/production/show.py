"""Prints comparisons and drift as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from vfl.production.compare import Comparison
from vfl.report.table import new_table, wide_console
from vfl_common.text import clean
from vfl_party.production.input_drift import DRIFTED, MOVED, Shift

_MAX_CHARACTERS = 60


def show_comparison(comparison: Comparison, too_few: str = "") -> None:
    """Prints the metrics in a table, and the verdict. ``too_few``: see ``Comparison.too_few``."""
    table = new_table(f"{comparison.rows:,} {comparison.which}")
    for heading in ("metric", "better is"):
        table.add_column(heading, no_wrap=True)
    for heading in ("old", "new", "new - old", "95 % interval"):
        table.add_column(heading, no_wrap=True, justify="right")
    for measure in comparison.measures:
        table.add_row(
            measure.name,
            "higher" if measure.higher_is_better else "lower",
            f"{measure.old:.4f}",
            f"{measure.new:.4f}",
            f"{measure.difference:+.4f}",
            f"{measure.low:+.4f} to {measure.high:+.4f}",
        )
    lines = [
        Text(""),
        *(Text(clean(sentence)) for sentence in (comparison.verdict, too_few) if sentence),
    ]
    if comparison.unlabelled:
        count = comparison.unlabelled
        left_out = f"left out: {count:,} {'row' if count == 1 else 'rows'} without a label"
        lines.append(Text(left_out, "dim"))
    wide_console().print(Group(table, *lines))


def show_drift(shifts: Sequence[Shift]) -> None:
    """Prints the index of each column, the greatest first, and the number of drifted columns."""
    table = new_table("Population stability index of each column")
    table.add_column("column", no_wrap=True)
    table.add_column("PSI index", justify="right")
    table.add_column("by chance up to", justify="right")
    table.add_column("verdict")
    for shift in shifts:
        numbers = (f"{shift.index:.3f}", f"{shift.chance:.3f}")
        table.add_row(clean(shift.name, _MAX_CHARACTERS), *numbers, shift.verdict)
    counts = {word: sum(shift.verdict == word for shift in shifts) for word in ("drifted", "moved")}
    summary = f"columns: {len(shifts)}; drifted: {counts['drifted']}; moved: {counts['moved']}"
    limits = f"moved: from {MOVED:g}; drifted: from {DRIFTED:g}; both only beyond chance"
    wide_console().print(Group(table, Text(""), Text(summary), Text(limits, "dim")))
