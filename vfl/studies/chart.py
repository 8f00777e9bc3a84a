"""Draws a study as PNG: the metric by label count, a line a method. Imports matplotlib, without a
display.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from vfl.studies.plan import StudyFile
from vfl.studies.report import FineTuned, mean_and_sd, points

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_MARKERS = "osD^vP*X"
_DPI = 130
# Methods; more are drawn as named rows instead of coloured lines.
_MOST_LINES = 6
# The share of the distance between two label counts over which the methods are spread.
_SPREAD = 0.3


def draw_study(study: StudyFile, results: Iterable[FineTuned], path: Path) -> Path:
    """Draws means and standard deviations over the seeds. Returns ``path``."""
    found = list(results)
    if len(study.methods) > _MOST_LINES:
        return _draw_many(study, found, path)
    factor, unit = points(study.metric)
    by_labels = bool(study.labels)
    columns: tuple[int | None, ...] = tuple(sorted(study.labels)) if by_labels else (None,)
    count = len(study.methods)
    figure = Figure(
        figsize=(max(5.2, 1.5 * len(columns) + 3.2) if by_labels else 5.2, 3.8),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, method in enumerate(study.methods):
        x, y, spread = [], [], []
        for place, labels in enumerate(columns):
            values = [
                factor * r.value(study.metric)
                for r in found
                if r.method == method.name and r.labels == labels
            ]
            if values:
                middle, sd = mean_and_sd(values)
                # So that error bars do not overlap.
                shift = _SPREAD * ((number + 0.5) / count - 0.5)
                x.append(place + shift if by_labels else number)
                y.append(middle)
                spread.append(sd or 0.0)
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        line = "-" if by_labels else ""
        axes.errorbar(
            x, y, spread, color=color, marker=marker, linestyle=line, capsize=3, label=method.name
        )
    if by_labels:
        axes.set_xticks(range(len(columns)), [f"{labels:,}" for labels in columns])
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_xlabel("labelled rows")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.set_xticks(
            range(count), [method.name for method in study.methods], rotation=20, ha="right"
        )
        axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylabel(f"test {study.metric}" + (f" ({unit})" if unit != study.metric else ""))
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    seeds = len({result.seed for result in found})
    over = f"mean and standard deviation of {seeds} seed{'s' if seeds != 1 else ''}"
    axes.set_title(f"{study.name}\n{over}", loc="left", fontsize="medium")
    figure.savefig(path, dpi=_DPI)
    return path


def _draw_many(study: StudyFile, found: Sequence[FineTuned], path: Path) -> Path:
    """Draws a row for each method, in a colour for each label count."""
    factor, unit = points(study.metric)
    columns: tuple[int | None, ...] = tuple(sorted(study.labels)) or (None,)
    count = len(study.methods)
    figure = Figure(figsize=(7.2, 1.2 + 0.28 * count), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, labels in enumerate(columns):
        x, y, spread = [], [], []
        for row, method in enumerate(study.methods):
            values = [
                factor * r.value(study.metric)
                for r in found
                if r.method == method.name and r.labels == labels
            ]
            if values:
                middle, sd = mean_and_sd(values)
                x.append(middle)
                y.append(row + _SPREAD * ((number + 0.5) / len(columns) - 0.5))
                spread.append(sd or 0.0)
        label = None if labels is None else f"{labels:,} labelled rows"
        color, marker = _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)]
        axes.errorbar(
            x, y, xerr=spread, color=color, marker=marker, linestyle="", capsize=2, label=label
        )
    axes.set_yticks(range(count), [method.name for method in study.methods])
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_xlabel(f"test {study.metric}" + (f" ({unit})" if unit != study.metric else ""))
    axes.grid(axis="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if columns != (None,):
        figure.legend(frameon=False, loc="outside upper right", ncols=len(columns))
    seeds = len({result.seed for result in found})
    figure.suptitle(
        f"{study.name}: mean and sd of {seeds} seed{'s' if seeds != 1 else ''}", x=0.01, ha="left"
    )
    figure.savefig(path, dpi=_DPI)
    return path
