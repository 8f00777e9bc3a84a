"""FedOnce's studies as PNG: quality against bytes, against epsilon, and against the number of
parties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.fedonce_numbers import (
    ALONE,
    COMM,
    L0,
    MULTI,
    PCA,
    SPLIT,
    scaled,
    split_curve,
    upload_bytes,
    validation,
)
from benchmarks.studies import Done
from vfl_lab.studies.report import compute_mean_and_sd, get_display_unit

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#777777"
DPI = 130
# Of the height, between two labels.
APART = 0.045


def draw_comparison(done: Done, title: str, path: Path) -> None:
    """Draws the metric of the validation rows against message bytes of training (the paper's Fig.
    6).

    A method that needs no bytes is a line across, with its name at the right.
    """
    factor, unit = get_display_unit(done.study.metric)
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for method, color in ((SPLIT, BLUE), (MULTI, ORANGE)):
        if done.of(method):
            found = split_curve(done, method)
            x, y = [size / 1e6 for size in found.bytes_], [factor * value for value in found.means]
            low = [factor * (value - sd) for value, sd in zip(found.means, found.sds, strict=True)]
            high = [factor * (value + sd) for value, sd in zip(found.means, found.sds, strict=True)]
            axes.plot(x, y, color=color, marker="o", markersize=2.5, linewidth=1.2, label=method)
            axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    for method, color, marker in ((L0, ORANGE, "*"), (PCA, GREEN, "P"), (COMM, BLUE, "X")):
        runs = done.of(method)
        if runs:
            size = mean(_sent(done, method)) / 1e6
            middle, sd = compute_mean_and_sd([factor * value for value in validation(done, method)])
            large = 17 if marker == "*" else 10
            look = {
                "color": color,
                "marker": marker,
                "markersize": large,
                "linestyle": "",
                "markeredgecolor": "white",
            }
            axes.errorbar([size], [middle], [sd or 0.0], capsize=3, label=method, zorder=3, **look)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    # Errors: the first ones, after little training, are many times as large as the rest.
    if unit != "points":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
    _levels(axes, {name: factor * mean(validation(done, name)) for name in ALONE if done.of(name)})
    axes.set_xlabel("message bytes of training, all parties (MB)")
    axes.set_ylabel(
        "validation "
        f"{done.study.metric.upper() if unit != 'points' else done.study.metric} "
        f"({_unit(unit)})"
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper center", ncols=5)
    axes.set_title(f"{title}: mean and sd of {_seeds(done)}", loc="left", fontsize="medium")
    figure.savefig(path, dpi=DPI)


def _sent(done: Done, method: str) -> list[float]:
    if method == COMM:
        return [split_curve(done, method).bytes_[-1]]
    return [float(upload_bytes(done, result)) for result in done.of(method)]


def _levels(axes: Axes, values: dict[str, float]) -> None:
    """Draws lines across, with their names at the right, moved apart if they would overlap.

    A line that is farther away than the height of the drawn curves is only named, with an arrow at
    that edge.
    """
    log = axes.get_yscale() == "log"
    low, high = (math.log10(each) if log else each for each in axes.get_ylim())
    names = dict(values)
    values = {name: math.log10(value) if log else value for name, value in names.items()}
    near = {
        name: value for name, value in values.items() if 2 * low - high <= value <= 2 * high - low
    }
    low, high = min([low, *near.values()]), max([high, *near.values()])
    margin = 0.04 * (high - low)
    low, high = low - margin, high + margin
    axes.set_ylim(*((10**low, 10**high) if log else (low, high)))
    below = {name: value for name, value in values.items() if value < low}
    apart = APART * (high - low)
    place = low - apart * (len(below) > 0)
    for name, value in sorted(values.items(), key=lambda item: item[1]):
        arrow = "↓ " if value < low else "↑ " if value > high else ""
        if not arrow:
            axes.axhline(names[name], color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        place = max(place + apart, min(max(value, low), high))
        at, text = (1.01, 10**place if log else place), f"{arrow}{name} {names[name]:.4g}"
        axes.annotate(
            text, at, xycoords=("axes fraction", "data"), va="center", fontsize=8, color=GREY
        )


def _unit(unit: str) -> str:
    return {"rmse": "in the label's unit", "rmse_scaled": "labels in 0 to 1"}.get(unit, unit)


def _seeds(done: Done) -> str:
    count = len({result.seed for result in done.results})
    return f"{count} seed{'s' if count != 1 else ''}"


def draw_privacy(
    done: Done, variants: Sequence[str], epsilons: Sequence[float], title: str, path: Path
) -> None:
    """Draws the metric of the test rows against epsilon, one line for each variant; without noise
    at the right.
    """
    factor, unit = get_display_unit(done.study.metric)
    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    names = [*map("{:g}".format, epsilons), "inf"]
    for number, (variant, color) in enumerate(zip(variants, (BLUE, ORANGE, GREEN), strict=True)):
        x, y, spread = [], [], []
        for place, epsilon in enumerate(names):
            values = [
                factor * result.value(done.study.metric)
                for result in done.of(f"{variant}-{epsilon}")
            ]
            if values:
                middle, sd = compute_mean_and_sd(values)
                x.append(place + 0.08 * (number - 1))
                y.append(middle)
                spread.append(sd or 0.0)
        division, targets = variant.split("-")
        label = f"{division} division, {targets} targets" + (
            " (no guarantee)" if targets == "matched" else ""
        )
        axes.errorbar(x, y, spread, color=color, marker="osD"[number], capsize=3, label=label)
    axes.set_xticks(range(len(names)), [*names[:-1], "∞"])
    axes.set_xlabel("ε of all parties' training together (δ = 1e-5)")
    axes.set_ylabel(f"test {done.study.metric.replace('rmse_scaled', 'RMSE')} ({_unit(unit)})")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(
        f"FedOnce-L1, {title}: mean and sd of {_seeds(done)}", loc="left", fontsize="medium"
    )
    figure.savefig(path, dpi=DPI)


def draw_scale(done: Done, path: Path) -> None:
    """Draws seconds, memory and accuracy by the number of passive parties."""
    found = scaled(done)
    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    x = [each.passives for each in found]
    values = (
        ("seconds of the run", [each.seconds for each in found]),
        ("PSS of a passive process\n(median, MiB)", [each.pss_mib or 0.0 for each in found]),
        ("test accuracy (points)", [100 * each.accuracy for each in found]),
    )
    for axes, (label, y), color in zip(panels, values, (BLUE, ORANGE, GREEN), strict=True):
        axes.plot(x, y, color=color, marker="o")
        axes.set_xticks(x)
        axes.set_ylim(0, 100 if "accuracy" in label else 1.15 * max(y))
        axes.set_xlabel("passive processes")
        axes.set_ylabel(label)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "FedOnce-L0 on one machine, UJIIndoorLoc's building and floor",
        x=0.01,
        ha="left",
        fontsize="medium",
    )
    figure.savefig(path, dpi=DPI)
