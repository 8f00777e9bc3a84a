"""The one picture of the leak meter: a panel an asset and attack, leak over metric, the worst leaks first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vfl.leaking.result import Line, Rehearsed, assets
from vfl.report.picture import Picture
from vfl.report.table import size
from vfl_common.text import listed

_LEAST, _MOST = 14.0, 110.0  # points squared
_PANELS, _ACROSS = 9, 3  # at most; a row of them


def draw(found: Sequence[Rehearsed]) -> Figure:
    """Draws what each attack reads: the 95 % quantile of batches, or the value if there are no batches.

    Of what an attack may know, a panel shows that with which it reads most. A recipe has one colour in all panels; the
    area of a point grows with the bytes. The dashed line is chance, or the best without any message if that is more;
    the mean over the recipes. Below stands what is left out.
    """
    every = _panels(found)
    keys, rest = every[:_PANELS], every[_PANELS:]
    across = min(_ACROSS, max(1, len(keys)))
    down = max(1, -(-len(keys) // across))
    figure = Picture(figsize=(3.0 * across + 1.8, 2.6 * down + 0.7), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharex=True).flatten()
    for axes in grid[len(keys) :]:
        axes.set_visible(False)
    largest = max((each.payload_bytes for each in found), default=1) or 1
    for key, axes in zip(keys, grid, strict=False):
        _panel(axes, key, found, largest)
    if not keys:
        figure.text(0.5, 0.5, "No attack was played.", ha="center")
    metric = next((each.metric for each in found if each.metric), "metric")
    figure.supxlabel(f"{metric}\n{_left_out(rest, across)}", fontsize=8)
    handles = [
        Line2D([], [], ls="", marker="o", color=_colour(number), label=f"{each.name}, {size(each.payload_bytes)}")
        for number, each in enumerate(found)
    ]
    handles.append(Line2D([], [], color="0.5", ls="--", lw=0.8, label="chance, or without\nany message"))
    figure.legend(handles=handles, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def draw_images(found: Sequence[Rehearsed]) -> dict[str, bytes]:
    """Returns {``images-RECIPE-PARTY.png``: a PNG of private images, above what an attack made of them}."""
    from vfl_party.attacks.picture import draw_pairs

    drawn: dict[str, bytes] = {}
    for each in found:
        for drawing in each.drawings:
            shown = drawing.shown
            words = [drawing.attack, each.name, shown.party]
            stem = "-".join(re.sub(r"[^\w.-]+", "-", word).strip("-.") for word in words)
            name = f"{stem}.png"
            while name in drawn:  # names that differ only by what no file name can hold
                name = f"{name.removesuffix('.png')}-2.png"
            title = f"{each.name}: images of {shown.party}, from {drawing.place} by {drawing.attacker}\n{shown.says}"
            drawn[name] = draw_pairs(shown.rows, title)
    return drawn


def _panels(found: Sequence[Rehearsed]) -> list[tuple[str, ...]]:
    """Returns the assets to draw, the worst leak first: of those that an attack reads alike, the worst."""
    most: dict[tuple[str, ...], tuple[str, ...]] = {}
    for asset in assets(found):
        most.setdefault(asset[:3], asset)
    return list(most.values())


def _left_out(rest: Sequence[tuple[str, ...]], across: int) -> str:
    few = f"; {listed([f'{attack} by {attacker}: {of}' for attack, attacker, of, *_ in rest])}" if rest else ""
    return fill(f"Not drawn: single columns, and what the same attack reads with other knowledge{few}", 46 * across)


def _colour(number: int) -> Any:
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    return colours[number % len(colours)]


def _panel(axes: Any, key: tuple[str, ...], found: Sequence[Rehearsed], largest: int) -> None:
    attack, attacker, of, knows, unit = key
    lines: list[Line] = []
    for number, each in enumerate(found):
        line = next((line for line in each.worst if line.asset == key), None)
        if line is None:
            continue
        lines.append(line)
        x = each.utility.mean if each.utility is not None else 0.0
        area = _LEAST + (_MOST - _LEAST) * each.payload_bytes / largest
        shown = line.high or line.value
        axes.errorbar([x], [shown.mean], yerr=[shown.sd], color=_colour(number), lw=1, capsize=2)
        axes.scatter([x], [shown.mean], s=area, color=_colour(number))
    floors = [line.chance_high.mean if line.chance_high is not None else line.floor for line in lines]
    axes.axhline(sum(floors) / len(floors), color="0.5", ls="--", lw=0.8)
    what = f"known: {knows}" if knows else f"from {listed(list(dict.fromkeys(line.place for line in lines)))}"
    axes.set_title(f"{attack} by {attacker}: {of}\n{what}", fontsize=8, loc="left")
    axes.set_ylabel(f"{unit}, 95 % of batches" if lines[0].high is not None else unit, fontsize=8)
    axes.tick_params(labelsize=7, labelbottom=True)
    axes.grid(alpha=0.25)
    axes.margins(0.12)
    axes.spines[["top", "right"]].set_visible(False)
