"""Draws where a step's time goes: encode, wait, decode and compute, a bar for each party. Imports
matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from vfl.report.picture import Picture
from vfl_common.summary import PhaseTimes, Summary

_PARTS = ("compute", "encode", "wait", "decode")
# Wait: nothing is done.
_COLORS = {"compute": "#009E73", "encode": "#0072B2", "wait": "#CCCCCC", "decode": "#D55E00"}
# Of the longest bar: a part that is shorter gets no number.
_LEAST = 0.06


def times_of(summary: Summary, phases: Sequence[str] = ()) -> Picture:
    """Returns a panel for each phase in which a party made steps, in the order of ``phases``, with
    a bar a party.
    """
    found: dict[str, list[tuple[str, PhaseTimes]]] = {name: [] for name in phases}
    for party in summary.parties:
        for each in party.times:
            if each.steps:
                found.setdefault(each.phase, []).append((party.name, each))
    panels = {name: bars for name, bars in found.items() if bars}
    heights = [0.32 * len(bars) + 0.95 for bars in panels.values()]
    figure = Picture(figsize=(8.2, sum(heights) + 0.9), layout="constrained")
    text = "no phase has steps"
    if panels:
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, (name, bars) in zip(grid.flat, panels.items(), strict=True):
            _panel(axes, name, bars)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=len(_PARTS), frameon=False)
        text = "a step's time at each party, on average" + (
            "; each panel has its own scale" if len(panels) > 1 else ""
        )
    figure.suptitle(f"{summary.run_id}\n{text}", fontsize="medium", x=0.01, ha="left")
    return figure


def shares(times: PhaseTimes) -> dict[str, float]:
    """Returns {part: seconds a step}, in the order in which they are drawn."""
    return {part: getattr(times, f"{part}_s") / max(1, times.steps) for part in _PARTS}


def _panel(axes: Axes, phase: str, bars: Sequence[tuple[str, PhaseTimes]]) -> None:
    of = {name: shares(times) for name, times in bars}
    most_s = max(sum(each.values()) for each in of.values()) or 1e-9
    factor, unit = (1e3, "ms") if most_s < 1 else (1.0, "s")
    begins = dict.fromkeys(of, 0.0)
    for part in _PARTS:
        values = [factor * each[part] for each in of.values()]
        axes.barh(
            range(len(of)),
            values,
            left=list(begins.values()),
            color=_COLORS[part],
            label=part,
            height=0.7,
        )
        for place, (name, value) in enumerate(zip(of, values, strict=True)):
            if value >= _LEAST * factor * most_s:
                middle = begins[name] + value / 2
                color = "black" if part == "wait" else "white"
                axes.text(
                    middle, place, f"{value:.3g}", ha="center", va="center", fontsize=8, color=color
                )
            begins[name] += value
    for place, (name, times) in enumerate(bars):
        end = begins[name]
        waits = of[name]["wait"] * factor / end if end else 0.0
        text = f"{end:.3g} {unit}, {100 * waits:.0f} % wait, {times.steps:,} steps"
        axes.annotate(
            text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(of)), list(of), fontsize=8)
    axes.set_ylim(len(of) - 0.5, -0.5)
    # Room for the words.
    axes.set_xlim(0, factor * most_s * 1.4)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"{unit} a step", fontsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(phase, loc="left", fontsize=10)
