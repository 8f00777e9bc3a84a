"""Draws the time of a step at each party by activity: encode, wait, decode and compute."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from vfl.report.picture import NotebookFigure
from vfl_common.summary import PhaseTimes, Summary

_PARTS = ("compute", "encode", "wait", "decode")
_COLORS = {"compute": "#009E73", "encode": "#0072B2", "wait": "#CCCCCC", "decode": "#D55E00"}
# A part shorter than this share of the longest bar gets no number.
_MIN_SHARE = 0.06


def times_of(summary: Summary, phases: Sequence[str] = ()) -> NotebookFigure:
    """Draws a panel for each phase with steps, in the order of ``phases``, with a bar for each
    party.
    """
    bars_by_phase: dict[str, list[tuple[str, PhaseTimes]]] = {name: [] for name in phases}
    for party in summary.parties:
        for times in party.times:
            if times.steps:
                bars_by_phase.setdefault(times.phase, []).append((party.name, times))
    panels = {name: bars for name, bars in bars_by_phase.items() if bars}
    heights = [0.32 * len(bars) + 0.95 for bars in panels.values()]
    figure = NotebookFigure(figsize=(8.2, sum(heights) + 0.9), layout="constrained")
    text = "no phase has steps"
    if panels:
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, (name, bars) in zip(grid.flat, panels.items(), strict=True):
            _panel(axes, name, bars)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=len(_PARTS), frameon=False)
        scale = "; each panel has its own scale" if len(panels) > 1 else ""
        text = f"mean time of a step at each party{scale}"
    figure.suptitle(f"{summary.run_id}\n{text}", fontsize="medium", x=0.01, ha="left")
    return figure


def shares(times: PhaseTimes) -> dict[str, float]:
    """Returns {activity: seconds per step}, in the order in which they are drawn."""
    return {part: getattr(times, f"{part}_s") / max(1, times.steps) for part in _PARTS}


def _panel(axes: Axes, phase: str, bars: Sequence[tuple[str, PhaseTimes]]) -> None:
    of = {name: shares(times) for name, times in bars}
    max_s = max(sum(parts.values()) for parts in of.values()) or 1e-9
    factor, unit = (1e3, "ms") if max_s < 1 else (1.0, "s")
    begins = dict.fromkeys(of, 0.0)
    for part in _PARTS:
        values = [factor * parts[part] for parts in of.values()]
        axes.barh(
            range(len(of)),
            values,
            left=list(begins.values()),
            color=_COLORS[part],
            label=part,
            height=0.7,
        )
        for place, (name, value) in enumerate(zip(of, values, strict=True)):
            if value >= _MIN_SHARE * factor * max_s:
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
    # Leaves room for the text.
    axes.set_xlim(0, factor * max_s * 1.4)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(f"{unit} per step", fontsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(phase, loc="left", fontsize=10)
