"""Draws the charts of a run, and writes them as PNG: learning curves, bytes by link, time per step,
and the contribution of each party.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vfl.summary.picture import BLUE, GREEN, GREY, ORANGE, NotebookFigure, style
from vfl_common.text import clean
from vfl_party.predict.input_drift import DRIFTED, MOVED, Shift

if TYPE_CHECKING:
    from vfl_lab.production.compare import Comparison


import math
from pathlib import Path

from vfl.summary.picture import (
    annotate,
    curves_by_phase,
    curves_of,
    has_curve,
    save,
    style_bars,
)
from vfl.summary.reading import RunRecord, find
from vfl.summary.table import format_size, select_sets, sort_phases
from vfl_common.bundle import CONTROL
from vfl_common.summary import LinkBytes, PhaseTimes, SetQuality, Summary, Worth
from vfl_common.text import shorten

_TITLES = {
    "align": "align (entity alignment)",
    "open": "open (comparing rows)",
    CONTROL: "control (joining, heartbeats, progress, results)",
}
# Maximum number of links in one column of panels; with more, there are two columns.
_MAX_ROWS = 24
_ACTIVITIES = ("compute", "encode", "wait", "decode")
_COLORS = {"compute": GREEN, "encode": BLUE, "wait": "#CCCCCC", "decode": ORANGE}
# An activity shorter than this share of the longest bar gets no number.
_MIN_SHARE = 0.06
# Maximum number of characters in the label of a set of parties.
_MAX_LABEL = 40


def draw_folder(folder: Path) -> list[Path]:
    """Draws the run in ``folder``, for ``vfl-party run --report`` (entry point ``vfl.reports``).

    Raises InputError.
    """
    return draw(find(folder))


def draw(run: RunRecord) -> list[Path]:
    """Writes ``learning-curves.png``, ``bytes.png``, ``times.png`` and ``worth.png`` into the run's
    folder, and returns their paths. A chart without data is left out.
    """
    paths = []
    phases, own = curves_by_phase(run)
    if any(
        has_curve(curve)
        for curve in (
            *phases.values(),
            *(curve for parties in own.values() for curve in parties.values()),
        )
    ):
        paths.append(save(curves_of(run.summary, phases, own), run.folder / "learning-curves.png"))
    if run.summary.bytes.by_link:
        paths.append(save(draw_link_bytes(run.summary, run.phases), run.folder / "bytes.png"))
    if any(party.times for party in run.summary.parties):
        paths.append(save(draw_step_times(run.summary, run.phases), run.folder / "times.png"))
    if run.summary.worth is not None:
        paths.append(
            save(draw_contributions(run.summary, run.summary.worth), run.folder / "worth.png")
        )
    return paths


def draw_link_bytes(summary: Summary, phases: Sequence[str]) -> NotebookFigure:
    """Draws a panel for each phase, with a bar of payload and envelope bytes for each link."""
    panels = [(name, _sum_links(summary, name)) for name in sort_phases(summary, phases)]
    columns = 2 if sum(len(bars) for _, bars in panels) > _MAX_ROWS and len(panels) > 1 else 1
    rows = math.ceil(len(panels) / columns)
    tallest = [
        max(len(bars) for _, bars in panels[r * columns : (r + 1) * columns]) for r in range(rows)
    ]
    heights = [0.27 * count + 0.85 for count in tallest]
    figure = NotebookFigure(8.2 * columns, sum(heights) + 0.9)
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    cells = list(grid.flat)
    for axes, (name, bars) in zip(cells, panels, strict=False):
        _draw_bytes(axes, name, bars)
    for axes in cells[len(panels) :]:
        axes.axis("off")
    total = summary.bytes.total
    envelope = total.message_bytes - total.payload_bytes
    text = (
        f"{format_size(total.payload_bytes)} of tensors (payload), {format_size(envelope)} "
        f"around them (envelope); TLS not "
        f"counted{'; each panel has its own scale' if len(panels) > 1 else ''}"
    )
    figure.set_heading(f"{summary.run_id}\n{text}")
    handles, labels = cells[0].get_legend_handles_labels()
    # Placed below, because the title is too wide to share its line.
    figure.legend(handles, labels, loc="outside lower right", ncols=2, frameon=False)
    return figure


def _sum_links(summary: Summary, phase: str) -> list[tuple[str, int, int]]:
    """Returns (link, payload bytes, envelope bytes) of one phase. Links to the active party come
    first, and links from the active party last.
    """
    roles = {party.name: party.role for party in summary.parties}
    order = {party.name: place for place, party in enumerate(summary.parties)}
    sums: dict[tuple[str, str], list[int]] = {}
    for link in summary.bytes.by_link:
        if link.phase == phase:
            count = sums.setdefault((link.sender, link.receiver), [0, 0])
            count[0] += link.payload_bytes
            count[1] += _compute_envelope(link)
    hub = "server" if any("server" in (roles.get(a), roles.get(b)) for a, b in sums) else "active"

    def sort_key(key: tuple[str, str]) -> tuple[bool, int, int]:
        sender, receiver = key
        return roles.get(sender) == hub, order.get(sender, 0), order.get(receiver, 0)

    return [(" → ".join(key), sums[key][0], sums[key][1]) for key in sorted(sums, key=sort_key)]


def _compute_envelope(link: LinkBytes) -> int:
    return link.message_bytes - link.payload_bytes


def _draw_bytes(axes: Axes, phase: str, bars: Sequence[tuple[str, int, int]]) -> None:
    largest = max((payload + envelope for _, payload, envelope in bars), default=1) or 1
    factor, unit = next(
        ((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= f), (1.0, "bytes")
    )
    places = range(len(bars))
    payloads = [payload / factor for _, payload, _ in bars]
    envelopes = [envelope / factor for _, _, envelope in bars]
    axes.barh(places, payloads, color=BLUE, label="payload", height=0.7)
    axes.barh(places, envelopes, left=payloads, color=ORANGE, label="envelope", height=0.7)
    for place, (_, payload, envelope) in zip(places, bars, strict=True):
        total = payload + envelope
        text = format_size(total) + (f", {envelope / total:.1%} envelope" if payload else "")
        annotate(axes, text, total / factor, place)
    axes.set_yticks(places, [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(bars) - 0.5, -0.5)
    # The limit leaves room for the numbers to the right of the bars.
    axes.set_xlim(0, largest / factor * 1.32)
    axes.set_xlabel(unit, fontsize=8)
    style_bars(axes)
    total = sum(payload + envelope for _, payload, envelope in bars)
    axes.set_title(f"{_TITLES.get(phase, phase)}: {format_size(total)}", loc="left", fontsize=10)


def draw_step_times(summary: Summary, phases: Sequence[str] = ()) -> NotebookFigure:
    """Draws a panel for each phase that has steps, with a bar of mean step times for each party.

    ``phases``: The names of the phases in the order of the panels.
    """
    bars_by_phase: dict[str, list[tuple[str, PhaseTimes]]] = {name: [] for name in phases}
    for party in summary.parties:
        for times in party.times:
            if times.steps:
                bars_by_phase.setdefault(times.phase, []).append((party.name, times))
    panels = {name: bars for name, bars in bars_by_phase.items() if bars}
    heights = [0.32 * len(bars) + 0.95 for bars in panels.values()]
    figure = NotebookFigure(8.2, sum(heights) + 0.9)
    text = "no phase has steps"
    if panels:
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, (name, bars) in zip(grid.flat, panels.items(), strict=True):
            _draw_times(axes, name, bars)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower right", ncols=len(_ACTIVITIES), frameon=False
        )
        scale = "; each panel has its own scale" if len(panels) > 1 else ""
        text = f"mean time of a step at each party{scale}"
    figure.set_heading(f"{summary.run_id}\n{text}")
    return figure


def compute_step_times(times: PhaseTimes) -> dict[str, float]:
    """Returns {activity: mean seconds per step}, in drawing order."""
    return {name: getattr(times, f"{name}_s") / max(1, times.steps) for name in _ACTIVITIES}


def _draw_times(axes: Axes, phase: str, bars: Sequence[tuple[str, PhaseTimes]]) -> None:
    step_times = {name: compute_step_times(times) for name, times in bars}
    max_s = max(sum(seconds.values()) for seconds in step_times.values()) or 1e-9
    factor, unit = (1e3, "ms") if max_s < 1 else (1.0, "s")
    begins = dict.fromkeys(step_times, 0.0)
    for activity in _ACTIVITIES:
        values = [factor * seconds[activity] for seconds in step_times.values()]
        axes.barh(
            range(len(step_times)),
            values,
            left=list(begins.values()),
            color=_COLORS[activity],
            label=activity,
            height=0.7,
        )
        for place, (name, value) in enumerate(zip(step_times, values, strict=True)):
            if value >= _MIN_SHARE * factor * max_s:
                middle = begins[name] + value / 2
                color = "black" if activity == "wait" else "white"
                axes.text(
                    middle, place, f"{value:.3g}", ha="center", va="center", fontsize=8, color=color
                )
            begins[name] += value
    for place, (name, times) in enumerate(bars):
        end = begins[name]
        wait_share = step_times[name]["wait"] * factor / end if end else 0.0
        text = f"{end:.3g} {unit}, {100 * wait_share:.0f} % wait, {times.steps:,} steps"
        annotate(axes, text, end, place)
    axes.set_yticks(range(len(step_times)), list(step_times), fontsize=8)
    axes.set_ylim(len(step_times) - 0.5, -0.5)
    # The limit leaves room for the text to the right of the bars.
    axes.set_xlim(0, factor * max_s * 1.4)
    axes.set_xlabel(f"{unit} per step", fontsize=8)
    style_bars(axes)
    axes.set_title(phase, loc="left", fontsize=10)


def draw_contributions(summary: Summary, worth: Worth) -> NotebookFigure:
    """Draws the Shapley value of each party, and the metric of each set of parties."""
    sets = select_sets(worth)
    heights = [0.32 * max(1, len(worth.shapley)) + 1.0, 0.27 * len(sets) + 1.0]
    figure = NotebookFigure(8.2, sum(heights) + 0.7)
    value_axes, quality_axes = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
    _draw_values(value_axes, worth)
    _draw_qualities(quality_axes, worth, sets)
    better = "lower" if worth.lower_is_better else "higher"
    text = f"{worth.metric} of the {worth.split} rows, {better} is better"
    figure.set_heading(f"{summary.run_id}\n{text}")
    return figure


def _draw_values(axes: Axes, worth: Worth) -> None:
    names = [shorten(name) for name in worth.shapley]
    values = [share.value for share in worth.shapley.values()]
    errors = [share.error for share in worth.shapley.values()]
    axes.barh(range(len(names)), values, xerr=errors, color=BLUE, ecolor=GREY, capsize=3)
    for place, (value, error) in enumerate(zip(values, errors, strict=True)):
        annotate(axes, f"{value:+.4f} ± {error:.4f}", max(value + error, 0.0), place, 6)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.axvline(0.0, color=GREY, linewidth=0.8)
    # The margin leaves room for the numbers to the right of the bars.
    axes.margins(x=0.35)
    axes.set_title(
        "Contribution of each party (Shapley value, standard error)", loc="left", fontsize=10
    )
    axes.invert_yaxis()
    style_bars(axes)


def _draw_qualities(axes: Axes, worth: Worth, sets: Sequence[SetQuality]) -> None:
    for split, color in (("validation", ORANGE), ("test", BLUE)):
        points = [
            (place, value)
            for place, subset in enumerate(sets)
            if (value := getattr(subset, split)) is not None
        ]
        if points:
            places, values = zip(*points, strict=True)
            axes.plot(values, places, "o", color=color, label=split, markersize=5)
    axes.set_yticks(range(len(sets)), [_format_set(subset) for subset in sets], fontsize=8)
    axes.set_title(f"{worth.metric} with these parties", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right" if not worth.lower_is_better else 0)
    axes.invert_yaxis()
    style_bars(axes)


def _format_set(subset: SetQuality) -> str:
    names = ", ".join(subset.parties) or "none"
    return names if len(names) <= _MAX_LABEL else f"{names[:_MAX_LABEL]}…"


_OUTCOME_COLORS = {"better": GREEN, "worse": ORANGE, "no difference": GREY, "too few rows": GREY}


_VERDICTS = {"stable": GREY, "moved": BLUE, "drifted": ORANGE}


# The maximum numbers of points in a scatter plot, of bars, and of panels.
_MAX_POINTS, _MAX_BARS, _MAX_PANELS = 5_000, 20, 4


_MAX_CHARACTERS = 24


def draw_comparison(comparison: Comparison) -> Figure:
    """Draws the difference of each metric with its interval, and a scatter plot of both scores."""
    figure = NotebookFigure(9.2, 3.8)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    for row, measure in enumerate(comparison.measures):
        bars = [[measure.difference - measure.low], [measure.high - measure.difference]]
        color = _OUTCOME_COLORS[measure.outcome]
        left.errorbar(
            [measure.difference], [row], xerr=np.abs(bars), fmt="o", color=color, capsize=4
        )
    left.axvline(0, color="black", linewidth=0.8)
    arrows = [
        f"{measure.name} ({'↑' if measure.higher_is_better else '↓'})"
        for measure in comparison.measures
    ]
    left.set_yticks(range(len(arrows)), arrows)
    left.set_ylim(len(arrows) - 0.5, -0.5)
    left.set_xlabel("new minus old, with 95 % intervals")
    left.set_title(
        f"{comparison.outcome}, by {comparison.measures[0].name}", loc="left", fontsize="medium"
    )
    old, new = (scores_NC[:, 0] for scores_NC in comparison.scores)
    step = max(1, -(-len(old) // _MAX_POINTS))
    right.scatter(old[::step], new[::step], s=6, alpha=0.4, color=BLUE, linewidths=0)
    ends = [min(old.min(), new.min()), max(old.max(), new.max())]
    right.plot(ends, ends, color="black", linewidth=0.8)
    right.set_xlabel("score of the old model")
    right.set_ylabel("score of the new model")
    right.set_title(f"{comparison.rows:,} {comparison.which}", loc="left", fontsize="medium")
    for axes in (left, right):
        style(axes)
    return figure


def draw_drift(shifts: Sequence[Shift]) -> Figure:
    """Draws the stability index of each column, and the distributions of the first columns."""
    bars, panels = list(shifts[:_MAX_BARS]), list(shifts[:_MAX_PANELS])
    height = max(4.2, 0.26 * len(bars) + 1.4)
    figure = NotebookFigure(10, height)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.4))[0]
    axes = left.subplots()
    names = [_shorten(shift.name) for shift in bars]
    colors = [_VERDICTS[shift.verdict] for shift in bars]
    axes.barh(range(len(bars)), [shift.index for shift in bars], color=colors)
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    for limit in (MOVED, DRIFTED):
        axes.axvline(limit, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"PSI index (dotted: {MOVED:g} and {DRIFTED:g})")
    limit_note = f", the first {len(bars)} of {len(shifts)}" if len(shifts) > len(bars) else ""
    axes.set_title(f"population stability{limit_note}", loc="left", fontsize="medium")
    style(axes)
    grid = right.subplots(-(-len(panels) // 2), min(2, len(panels)), squeeze=False)
    for panel in grid.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, shift in zip(grid.flat, panels, strict=False):
        _draw_distribution(panel, shift)
    grid.flat[0].legend(frameon=False, fontsize="x-small")
    return figure


def _draw_distribution(panel: Axes, column: Shift) -> None:
    """Draws the share of rows in each bin of a column, in training and now."""
    # Bins that are empty in training and now are left out.
    used_bins = [
        index
        for index, counts in enumerate(zip(column.before, column.now, strict=True))
        if any(counts)
    ]
    places = np.arange(len(used_bins))
    for shift, (counts, label, color) in enumerate(
        ((column.before, "training", GREY), (column.now, "now", ORANGE))
    ):
        shares = np.array([counts[index] for index in used_bins]) / max(1, sum(counts))
        panel.bar(places + 0.4 * shift - 0.2, shares, 0.4, label=label, color=color)
    panel.set_xticks(
        places, [_shorten(column.bins[index]) for index in used_bins], rotation=60, ha="right"
    )
    panel.tick_params(labelsize="xx-small")
    panel.set_title(f"{_shorten(column.name)}: {column.index:.3f}", loc="left", fontsize="small")
    style(panel)


def _shorten(name: str) -> str:
    name = clean(name)
    return name if len(name) <= _MAX_CHARACTERS else f"{name[: _MAX_CHARACTERS - 1]}…"
