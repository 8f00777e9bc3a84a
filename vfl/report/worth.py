"""Draws the contribution of each party and the quality of sets of parties with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from vfl.report.picture import NotebookFigure
from vfl.report.table import sets_shown
from vfl_common.summary import SetQuality, Summary, Worth
from vfl_common.text import shorten

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#999999"
# Maximum number of characters of the names of a set.
_NAMES = 40


def worth_of(summary: Summary, worth: Worth) -> NotebookFigure:
    """Draws a bar with the standard error for each party, and a point for each set of parties."""
    sets = sets_shown(worth)
    heights = [0.32 * max(1, len(worth.shapley)) + 1.0, 0.27 * len(sets) + 1.0]
    figure = NotebookFigure(figsize=(8.2, sum(heights) + 0.7), layout="constrained")
    first, second = figure.subplots(2, 1, gridspec_kw={"height_ratios": heights})
    _values(first, worth)
    _qualities(second, worth, sets)
    better = "lower" if worth.lower_is_better else "higher"
    text = f"{worth.metric} of the {worth.split} rows, {better} is better"
    figure.suptitle(f"{summary.run_id}\n{text}", fontsize="medium", x=0.01, ha="left")
    return figure


def _values(axes: Axes, worth: Worth) -> None:
    names = [shorten(name) for name in worth.shapley]
    values = [share.value for share in worth.shapley.values()]
    errors = [share.error for share in worth.shapley.values()]
    axes.barh(range(len(names)), values, xerr=errors, color=_BLUE, ecolor=_GREY, capsize=3)
    for place, (value, error) in enumerate(zip(values, errors, strict=True)):
        axes.annotate(
            f"{value:+.4f} ± {error:.4f}",
            (max(value + error, 0.0), place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.axvline(0.0, color=_GREY, linewidth=0.8)
    # Leaves room for the numbers.
    axes.margins(x=0.35)
    axes.set_title(
        "Contribution of each party (Shapley value, standard error)", loc="left", fontsize=10
    )
    _plain(axes)


def _qualities(axes: Axes, worth: Worth, sets: Sequence[SetQuality]) -> None:
    for split, color in (("validation", _ORANGE), ("test", _BLUE)):
        points = [
            (place, value)
            for place, subset in enumerate(sets)
            if (value := getattr(subset, split)) is not None
        ]
        if points:
            places, values = zip(*points, strict=True)
            axes.plot(values, places, "o", color=color, label=split, markersize=5)
    axes.set_yticks(range(len(sets)), [_label(subset) for subset in sets], fontsize=8)
    axes.set_title(f"{worth.metric} with these parties", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right" if not worth.lower_is_better else 0)
    _plain(axes)


def _label(of: SetQuality) -> str:
    names = ", ".join(of.parties) or "none"
    return names if len(names) <= _NAMES else f"{names[:_NAMES]}…"


def _plain(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
