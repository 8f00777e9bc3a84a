"""Draws a search with matplotlib: the importance of each key, and the trials as lines over keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize

from vfl.report.page.svg import BLUE, GREY, ORANGE, short

# Finished trials: ({key: value}, objective).
Tried = Sequence[tuple[Mapping[str, Any], float]]
# Colours from the lowest to the highest value, visible on white and black and to colour-blind
# readers.
_COLORS = LinearSegmentedColormap.from_list("objective", [BLUE, GREY, ORANGE])
_LONGEST = 40


def width_of(spaces: Mapping[str, Any]) -> float:
    """Returns the width of the picture of trials, in inches."""
    return 2.2 * max(2, len(spaces)) + 1.5


def importance(axes: Axes, shares: Mapping[str, float]) -> None:
    """Draws the share of each key in the variance of the objective."""
    keys = sorted(shares, key=lambda key: shares[key])
    axes.barh([short(key, _LONGEST) for key in keys], [shares[key] for key in keys], color=BLUE)
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the variance (fANOVA)")
    axes.grid(axis="y", visible=False)


def parallel(axes: Axes, spaces: Mapping[str, Any], tried: Tried, objective: str) -> None:
    """Draws a line for each finished trial over the keys, coloured by the objective.

    ``spaces``: {key: its values, or a dict with ``from``, ``to`` and ``log``}.
    """
    scores = [score for _, score in tried]
    scale = Normalize(min(scores), max(scores))
    for values, score in tried:
        heights = [_height(space, values[key]) for key, space in spaces.items()]
        color = _COLORS(scale(score))
        axes.plot(range(len(spaces)), heights, color=color, marker="o", alpha=0.8)
    for place, space in enumerate(spaces.values()):
        for height, text in _ticks(space):
            axes.annotate(
                text, (place, height), (5, 4), textcoords="offset points", fontsize="small"
            )
        axes.axvline(place, color=GREY, zorder=0, linewidth=0.8)
    names = [short(key, _LONGEST) for key in spaces]
    axes.set_xticks(range(len(spaces)), names, rotation=15, ha="right")
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(spaces) - 0.5)
    axes.grid(visible=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure = axes.get_figure()
    assert figure is not None  # noqa: S101 - axes of a figure
    figure.colorbar(ScalarMappable(scale, _COLORS), ax=axes, label=objective)


def _height(space: Any, value: Any) -> float:
    """Returns the position of a value on its axis, from 0 to 1."""
    if isinstance(space, Mapping):
        low, high = space["from"], space["to"]
        if space.get("log"):
            low, high, value = log10(low), log10(high), log10(value)
        return float((value - low) / (high - low))
    return list(space).index(value) / max(1, len(space) - 1)


def _ticks(space: Any) -> list[tuple[float, str]]:
    values = [space["from"], space["to"]] if isinstance(space, Mapping) else list(space)
    return [
        (_height(space, value), short(f"{value:g}" if isinstance(value, float) else str(value)))
        for value in values
    ]
