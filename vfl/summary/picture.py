"""Draws with matplotlib without a display: helpers for every picture, and the learning curves of a
run.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vfl.summary.reading import OWN_SPLITS, Rounds, RunRecord, read_curves, read_own_curves
from vfl_common.errors import Code, InputError
from vfl_common.files import write_error
from vfl_common.summary import Summary

# Colours that colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
YELLOW, SKY, BLACK, GREY = "#E69F00", "#56B4E9", "#000000", "#999999"
_DPI = 130


class NotebookFigure(Figure):
    """A figure that any notebook displays as the value of a cell, without ``%matplotlib inline``.

    ``width`` and ``height`` are in inches.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        FigureCanvasAgg(self).print_png(file)  # type: ignore[no-untyped-call]
        return file.getvalue()

    def set_heading(self, text: str) -> None:
        """Writes a heading above all panels, aligned to the left."""
        self.suptitle(text, fontsize="medium", x=0.01, ha="left")


def style(axes: Axes, grid: Any = None, spines: tuple[str, ...] = ("top", "right")) -> None:
    """Hides sides of a panel, and draws pale grid lines for the axis ``grid``, if it is given."""
    if grid is not None:
        axes.grid(axis=grid, alpha=0.25)
        axes.set_axisbelow(True)
    axes.spines[list(spines)].set_visible(False)


def style_bars(axes: Axes) -> None:
    """Styles a panel of horizontal bars: small tick labels, and a grid for the x axis."""
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    style(axes, "x", ("top", "right", "left"))


def annotate(axes: Axes, text: str, x: float, y: float, distance: int = 4) -> None:
    """Writes a small text to the right of a point, at a ``distance`` in typographic points."""
    axes.annotate(text, (x, y), (distance, 0), textcoords="offset points", va="center", fontsize=8)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure to a file. Returns ``path``. Raises InputError if it cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise write_error(path, error) from None
    except ValueError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be drawn ({error}). Choose a name ending in .png."
        ) from None
    return path


_COLORS = {"train": BLUE, "validation": ORANGE, "test": GREEN, "cross": PINK, "local": SKY}
_PARTY_COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK, GREY)
_NO_PARTIES: Mapping[str, Mapping[str, Rounds]] = MappingProxyType({})
# The metrics that are drawn in a second panel, next to the loss.
_METRICS = ("accuracy", "auc", "rmse")
_LABELS = {"auc": "AUC", "rmse": "RMSE (unit of the label)", "loss": "mean loss"}
_LINES, _MARKERS = ("-", "--", ":"), ("o", "s", "^")


def draw_run_curves(run: RunRecord) -> Figure:
    """Returns the learning curves of a run, as ``vfl report`` draws them."""
    return curves_of(run.summary, *curves_by_phase(run))


def curves_by_phase(
    run: RunRecord,
) -> tuple[dict[str, Rounds], dict[str, dict[str, Rounds]]]:
    """Returns {phase: rounds of the active party}, in the order of the recipe, and {phase: {party:
    rounds}} for the phases in which each party has a loss.
    """
    rounds, own = read_curves(run), read_own_curves(run)
    return _sort_by_phase(run, rounds, own), own


def _sort_by_phase(
    run: RunRecord, rounds: Mapping[str, Rounds], own: Mapping[str, Mapping[str, Rounds]]
) -> dict[str, Rounds]:
    return {
        phase: rounds.get(phase, {})
        for phase in (*run.phases, *rounds)
        if phase in rounds or phase in own
    }


def curves_of(
    summary: Summary,
    phases: Mapping[str, Rounds],
    own: Mapping[str, Mapping[str, Rounds]] = _NO_PARTIES,
) -> Figure:
    """Draws one row of panels for each phase: the loss and the metrics of the task by round.

    A metric of only one round is not drawn as a curve.

    Args:
        summary: The summary of the run.
        phases: {phase: rounds of the active party}.
        own: {phase: {party: rounds}} for the phases in which each party has a loss.
    """

    def has_any(name: str) -> bool:
        return any(has_curve(rounds) for rounds in (phases[name], *own.get(name, {}).values()))

    curved = {name: rounds for name, rounds in phases.items() if has_any(name)}
    drawn_phases, min_points = (curved, 2) if curved else (dict(phases), 1)
    columns = (
        2 if any(_select_metrics(rounds, min_points) for rounds in drawn_phases.values()) else 1
    )
    figure = NotebookFigure(5.2 * columns, 0.9 + 3.5 * len(drawn_phases))
    axes = figure.subplots(len(drawn_phases), columns, squeeze=False)
    for row, (name, rounds) in zip(axes, drawn_phases.items(), strict=True):
        if name in own:
            draw_own_curves(row[0], own[name])
        else:
            draw_curve(row[0], rounds, ["loss"])
        row[0].set_title(f"{name}: loss", loc="left")
        if columns == 2:
            names = _select_metrics(rounds, min_points)
            if names:
                draw_curve(row[1], rounds, names)
                row[1].set_title(
                    f"{name}: {' and '.join(_format_metric(metric) for metric in names)}",
                    loc="left",
                )
            else:
                row[1].axis("off")
    figure.set_heading(f"{summary.run_id}\n{_describe_result(summary)}")
    return figure


def has_curve(rounds: Rounds) -> bool:
    """Returns whether more than one round has a metric to draw."""
    return (
        sum(
            any(name in named for named in splits.values() for name in (*_METRICS, "loss"))
            for splits in rounds.values()
        )
        > 1
    )


def _select_metrics(rounds: Rounds, min_points: int) -> list[str]:
    """Returns the metrics that at least one split has in ``min_points`` or more rounds."""
    points = Counter(
        (split, name)
        for splits in rounds.values()
        for split, named in splits.items()
        for name in named
    )
    return [
        name for name in _METRICS if any(points[split, name] >= min_points for split in _COLORS)
    ][:2]


def draw_curve(axes: Axes, rounds: Rounds, names: Sequence[str]) -> None:
    """Draws the metrics ``names`` by round. A colour stands for a split, and a line style and
    marker for a metric.
    """
    line_count = 0
    for split, color in _COLORS.items():
        for name, line, shape in zip(names, _LINES, _MARKERS, strict=False):
            values = {
                r: m[split][name]
                for r, m in rounds.items()
                if m.get(split, {}).get(name) is not None
            }
            if values:
                label = split if len(names) == 1 else f"{split} {_format_metric(name)}"
                marker = shape if len(values) <= 40 else ""
                axes.plot(
                    list(values),
                    list(values.values()),
                    line,
                    color=color,
                    label=label,
                    marker=marker,
                    markersize=3,
                )
                line_count += 1
    _style_round_axes(axes, _LABELS.get(names[0], names[0]) if len(names) == 1 else "")
    if line_count:
        axes.legend(frameon=False)


def draw_own_curves(axes: Axes, parties: Mapping[str, Rounds]) -> None:
    """Draws the losses of each party by round. A colour stands for a party, and a line style for
    the kind of loss (local, cross).
    """
    for place, (party, rounds) in enumerate(parties.items()):
        for split, line in zip(OWN_SPLITS, _LINES, strict=False):
            values = {
                r: m[split]["loss"]
                for r, m in rounds.items()
                if m.get(split, {}).get("loss") is not None
            }
            if values:
                color = _PARTY_COLORS[place % len(_PARTY_COLORS)]
                axes.plot(
                    list(values),
                    list(values.values()),
                    line,
                    color=color,
                    label=f"{split} {party}",
                    linewidth=1,
                )
    _style_round_axes(axes, _LABELS["loss"])
    axes.legend(frameon=False, fontsize=8, ncols=1 if len(parties) <= 4 else 2)


def _style_round_axes(axes: Axes, label: str) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    style(axes)


def _format_metric(metric: str) -> str:
    return metric.upper() if metric in ("auc", "rmse") else metric


def _describe_result(summary: Summary) -> str:
    """Returns a line such as ``test accuracy 0.975, AUC 0.999 · 600 steps in 3.9 s``."""
    split = next(
        (name for name in ("test", "validation", "train") if name in summary.metrics), None
    )
    named = summary.metrics[split] if split is not None else {}
    values = ", ".join(
        f"{_format_metric(name)} {named[name]:.4g}" for name in (*_METRICS, "loss") if name in named
    )
    done = f"{summary.steps:,} steps in {summary.wall_s:.1f} s"
    return f"{split} {values} · {done}" if values else done
