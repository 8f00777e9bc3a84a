"""The one picture of the leak meter: a panel an attack, leak over metric; the area of a point grows with the bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from vfl.leaking.result import Line, Rehearsed
from vfl.report.picture import Picture
from vfl.report.table import size

_LEAST, _MOST = 14.0, 110.0  # points squared
_PANELS, _ACROSS = 9, 3  # at most; a row of them

Key = tuple[str, str, str, str]


def draw(found: Sequence[Rehearsed]) -> Figure:
    """Draws the first attacks' figures: the 95 % quantile of batches, or the value if there are no batches.

    A recipe has one colour in all panels. The dashed line is chance, the mean over the recipes.
    """
    keys: list[Key] = list(dict.fromkeys(_key(line) for each in found for line in each.worst))[:_PANELS]
    across = min(_ACROSS, max(1, len(keys)))
    down = max(1, -(-len(keys) // across))
    figure = Picture(figsize=(3.0 * across + 1.8, 2.6 * down + 0.4), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True).flatten()
    for axes in grid[len(keys) :]:
        axes.set_visible(False)
    if not keys:
        figure.text(0.5, 0.5, "No attack was played.", ha="center")
    largest = max((each.payload_bytes for each in found), default=1) or 1
    for key, axes in zip(keys, grid, strict=False):
        _panel(axes, key, found, largest)
    figure.supxlabel(next((each.metric for each in found if each.metric), "metric"), fontsize="medium")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _panel(axes: Any, key: Key, found: Sequence[Rehearsed], largest: int) -> None:
    attack, of, knows, unit = key
    chances = []
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for number, each in enumerate(found):
        line = next((line for line in each.worst if _key(line) == key), None)
        x = each.utility.mean if each.utility is not None else 0.0
        area = _LEAST + (_MOST - _LEAST) * each.payload_bytes / largest
        name = f"{each.name}, {size(each.payload_bytes)}"
        if line is None:
            continue
        shown, colour = line.high or line.value, colours[number % len(colours)]
        axes.errorbar([x], [shown.mean], yerr=[shown.sd], color=colour, lw=1, capsize=2)
        axes.scatter([x], [shown.mean], s=area, color=colour, label=name)
        chance = line.chance_high or line.chance
        chances += [chance.mean] if chance is not None else []
    if chances:
        axes.axhline(sum(chances) / len(chances), color="0.5", ls="--", lw=0.8)
    axes.set_title(f"{attack}: {of}\nknown: {knows}", fontsize=8, loc="left")
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=7, labelbottom=True)
    axes.grid(alpha=0.25)
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)


def _key(line: Line) -> Key:
    return line.attack, line.of, line.knows, line.unit
