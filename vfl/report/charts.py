"""Draws learning curves of a run, and writes all its pictures as PNG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vfl.report.bars import bytes_of, times_of, worth_of
from vfl.report.picture import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    YELLOW,
    NotebookFigure,
    save,
    style,
)
from vfl.report.reading import OWN, Rounds, RunRecord, curves, find, own_curves
from vfl_common.summary import Summary

_COLORS = {"train": BLUE, "validation": ORANGE, "test": GREEN, "cross": PINK, "local": SKY}
_PARTIES = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, BLACK, GREY)
NOBODY: Mapping[str, Mapping[str, Rounds]] = MappingProxyType({})
# The metrics that are drawn in addition to the loss.
_METRICS = ("accuracy", "auc", "rmse")
_LABELS = {"auc": "AUC", "rmse": "RMSE (unit of the label)", "loss": "mean loss"}
_LINES, _MARKERS = ("-", "--", ":"), ("o", "s", "^")


def draw_folder(folder: Path) -> list[Path]:
    """Draws the run in ``folder``: the ``vfl.reports`` entry point of ``vfl-party run --report``.

    Raises InputError.
    """
    return draw(find(folder))


def draw(run: RunRecord) -> list[Path]:
    """Writes ``learning-curves.png`` (if the folder has metrics that make a curve), ``bytes.png``,
    ``times.png``, and ``worth.png`` if sets of parties were evaluated.
    """
    paths = []
    rounds, own = curves(run), own_curves(run)
    phases = _in_phases(run, rounds, own)
    if any(
        has_curve(curve)
        for curve in (*rounds.values(), *(curve for of in own.values() for curve in of.values()))
    ):
        paths.append(save(curves_of(run.summary, phases, own), run.folder / "learning-curves.png"))
    if run.summary.bytes.by_link:
        paths.append(save(bytes_of(run.summary, run.phases), run.folder / "bytes.png"))
    if any(party.times for party in run.summary.parties):
        paths.append(save(times_of(run.summary, run.phases), run.folder / "times.png"))
    if run.summary.worth is not None:
        paths.append(save(worth_of(run.summary, run.summary.worth), run.folder / "worth.png"))
    return paths


def figure_of(run: RunRecord) -> Figure:
    """Returns the learning curves of a run, as ``draw`` writes them."""
    return curves_of(run.summary, *curves_by_phase(run))


def curves_by_phase(
    run: RunRecord,
) -> tuple[dict[str, Rounds], dict[str, dict[str, Rounds]]]:
    """Returns {phase: the active party's rounds}, in the order of the recipe, and {phase: {party:
    its rounds}} of phases with a loss at each party.
    """
    rounds, own = curves(run), own_curves(run)
    return _in_phases(run, rounds, own), own


def _in_phases(
    run: RunRecord, rounds: Mapping[str, Rounds], own: Mapping[str, Mapping[str, Rounds]]
) -> dict[str, Rounds]:
    return {
        phase: rounds.get(phase, {})
        for phase in (*run.phases, *rounds)
        if phase in rounds or phase in own
    }


def curves_of(
    summary: Summary, phases: Mapping[str, Rounds], own: Mapping[str, Mapping[str, Rounds]] = NOBODY
) -> Figure:
    """Draws one row of panels for each phase: the loss and the metrics of the task by round.

    A metric of only one round is not drawn as a curve. ``phases``: the active party's rounds;
    ``own``: {phase: {party: rounds}} of phases with a loss at each party.
    """

    def has_any(name: str) -> bool:
        return any(has_curve(rounds) for rounds in (phases[name], *own.get(name, {}).values()))

    curved = {name: rounds for name, rounds in phases.items() if has_any(name)}
    drawn, min_points = (curved, 2) if curved else (dict(phases), 1)
    columns = 2 if any(_metric_names(rounds, min_points) for rounds in drawn.values()) else 1
    figure = NotebookFigure(5.2 * columns, 0.9 + 3.5 * len(drawn))
    axes = figure.subplots(len(drawn), columns, squeeze=False)
    for row, (name, rounds) in zip(axes, drawn.items(), strict=True):
        if name in own:
            draw_own_curves(row[0], own[name])
        else:
            draw_curve(row[0], rounds, ["loss"])
        row[0].set_title(f"{name}: loss", loc="left")
        if columns == 2:
            names = _metric_names(rounds, min_points)
            if names:
                draw_curve(row[1], rounds, names)
                row[1].set_title(
                    f"{name}: {' and '.join(_short(metric) for metric in names)}", loc="left"
                )
            else:
                row[1].axis("off")
    figure.set_heading(f"{summary.run_id}\n{_final(summary)}")
    return figure


def has_curve(rounds: Rounds) -> bool:
    """Returns whether there is more than one point to draw."""
    return (
        sum(
            any(name in named for named in splits.values() for name in (*_METRICS, "loss"))
            for splits in rounds.values()
        )
        > 1
    )


def _metric_names(rounds: Rounds, min_points: int) -> list[str]:
    """Returns the metrics to draw: those that a split has in at least ``min_points`` rounds."""
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
    """Draws the metrics ``names``, with a colour for each split, and a line style and marker for
    each metric.
    """
    drawn = 0
    for split, color in _COLORS.items():
        for name, line, shape in zip(names, _LINES, _MARKERS, strict=False):
            values = {
                r: m[split][name]
                for r, m in rounds.items()
                if m.get(split, {}).get(name) is not None
            }
            if values:
                label = split if len(names) == 1 else f"{split} {_short(name)}"
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
                drawn += 1
    _by_round(axes, _LABELS.get(names[0], names[0]) if len(names) == 1 else "")
    if drawn:
        axes.legend(frameon=False)


def draw_own_curves(axes: Axes, parties: Mapping[str, Rounds]) -> None:
    """Draws each party's own losses, with a colour for each party and a line style for each step
    (local, cross).
    """
    for place, (party, rounds) in enumerate(parties.items()):
        for split, line in zip(OWN, _LINES, strict=False):
            values = {
                r: m[split]["loss"]
                for r, m in rounds.items()
                if m.get(split, {}).get("loss") is not None
            }
            if values:
                color = _PARTIES[place % len(_PARTIES)]
                axes.plot(
                    list(values),
                    list(values.values()),
                    line,
                    color=color,
                    label=f"{split} {party}",
                    linewidth=1,
                )
    _by_round(axes, _LABELS["loss"])
    axes.legend(frameon=False, fontsize=8, ncols=1 if len(parties) <= 4 else 2)


def _by_round(axes: Axes, label: str) -> None:
    axes.set_xlabel("round")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    style(axes)


def _short(metric: str) -> str:
    return metric.upper() if metric in ("auc", "rmse") else metric


def _final(summary: Summary) -> str:
    """Returns a line such as ``test accuracy 0.975, AUC 0.999 · 600 steps in 3.9 s``."""
    split = next(
        (name for name in ("test", "validation", "train") if name in summary.metrics), None
    )
    named = summary.metrics[split] if split is not None else {}
    values = ", ".join(
        f"{_short(name)} {named[name]:.4g}" for name in (*_METRICS, "loss") if name in named
    )
    done = f"{summary.steps:,} steps in {summary.wall_s:.1f} s"
    return f"{split} {values} · {done}" if values else done
