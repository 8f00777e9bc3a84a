"""The one picture of the leak meter: leaks over the metric; the area of a point grows with the bytes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from vfl.leaking.result import Rehearsed
from vfl.report.picture import Picture
from vfl.report.table import size

_LEAST, _MOST = 30.0, 260.0  # points squared


def draw(found: Sequence[Rehearsed]) -> Figure:
    """Draws a point for each figure of each recipe; figures of one kind have one colour, over all recipes."""
    figure = Picture(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots()
    largest = max((each.payload_bytes for each in found), default=1) or 1
    colours: dict[tuple[str, str, str, str], str] = {}
    for each in found:
        x = each.utility.mean if each.utility is not None else 0.0
        area = _LEAST + (_MOST - _LEAST) * each.payload_bytes / largest
        for line in each.lines:
            key = (line.attack, line.of, line.knows, line.unit)
            first = key not in colours
            colour = colours.setdefault(key, f"C{len(colours) % 10}")
            shown = line.high if line.high is not None else line.value
            label = f"{line.attack}: {line.of} ({line.knows}), {line.unit}" if first else None
            axes.errorbar([x], [shown.mean], yerr=[shown.sd], color=colour, lw=1, capsize=2)
            axes.scatter([x], [shown.mean], s=area, color=colour, alpha=0.65, label=label)
        axes.annotate(
            f"{each.name}\n{size(each.payload_bytes)}",
            (x, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            fontsize=7,
            ha="center",
        )
    axes.set_xlabel(next((each.metric for each in found if each.metric), "metric"))
    axes.set_ylabel("leak (95 % of batches, where there are batches)")
    axes.grid(alpha=0.25)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=7, frameon=False)
    return figure
