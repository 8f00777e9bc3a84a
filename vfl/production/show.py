"""Prints comparisons and drift as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from vfl.production.compare import Comparison
from vfl.report.table import new_table, wide_console
from vfl_common.text import clean
from vfl_party.production.input_drift import DRIFTED, MOVED, Shift

_MOST = 60


def show_comparison(found: Comparison, too_few: str = "") -> None:
    """Prints the metrics side by side, and the verdict. ``too_few``: see ``Comparison.too_few``."""
    table = new_table(f"{found.rows:,} {found.which}")
    for heading in ("metric", "better is"):
        table.add_column(heading, no_wrap=True)
    for heading in ("old", "new", "new - old", "95 % interval"):
        table.add_column(heading, no_wrap=True, justify="right")
    for each in found.measures:
        table.add_row(
            each.name,
            "higher" if each.higher_is_better else "lower",
            f"{each.old:.4f}",
            f"{each.new:.4f}",
            f"{each.difference:+.4f}",
            f"{each.low:+.4f} to {each.high:+.4f}",
        )
    lines = [Text(""), *(Text(clean(said)) for said in (found.verdict, too_few) if said)]
    if found.unlabelled:
        count = found.unlabelled
        said = "1 row without a label is" if count == 1 else f"{count:,} rows without a label are"
        lines.append(Text(f"{said} left out", "dim"))
    wide_console().print(Group(table, *lines))


def show_drift(found: Sequence[Shift]) -> None:
    """Prints the index of each column, the greatest first, and how many have drifted."""
    table = new_table("Population stability index of each column")
    table.add_column("column", no_wrap=True)
    table.add_column("PSI index", justify="right")
    table.add_column("by chance up to", justify="right")
    table.add_column("verdict")
    for each in found:
        numbers = (f"{each.index:.3f}", f"{each.chance:.3f}")
        table.add_row(clean(each.name, _MOST), *numbers, each.verdict)
    counts = {word: sum(each.verdict == word for each in found) for word in ("drifted", "moved")}
    said = f"of {len(found)} columns {counts['drifted']} have drifted, and {counts['moved']} moved"
    limits = f"moved: from {MOVED:g}; drifted: from {DRIFTED:g}; both beyond chance"
    wide_console().print(Group(table, Text(""), Text(said), Text(limits, "dim")))
