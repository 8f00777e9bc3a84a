"""Draws learning curves and bytes as PNG with matplotlib, without a display."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vfl.report.picture import NotebookFigure
from vfl.report.reading import OWN, Rounds, RunRecord, curves, find, own_curves
from vfl.report.table import in_order, size
from vfl.report.times import times_of
from vfl.report.worth import worth_of
from vfl_common.files import write_error
from vfl_common.ledger import CONTROL
from vfl_common.summary import LinkBytes, Summary

# Colours that colour-blind readers can distinguish.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#999999"
_PINK, _SKY = "#CC79A7", "#56B4E9"
_COLORS = {"train": _BLUE, "validation": _ORANGE, "test": _GREEN, "cross": _PINK, "local": _SKY}
_PARTIES = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, "#E69F00", "#000000", _GREY)
NOBODY: Mapping[str, Mapping[str, Rounds]] = MappingProxyType({})
# The metrics that are drawn in addition to the loss.
_METRICS = ("accuracy", "auc", "rmse")
_LABELS = {"auc": "AUC", "rmse": "RMSE (unit of the label)", "loss": "mean loss"}
_TITLES = {
    "align": "align (finding the rows in common)",
    "open": "open (comparing rows)",
    CONTROL: "control (joining, heartbeats, progress, results)",
}
_LINES, _MARKERS = ("-", "--", ":"), ("o", "s", "^")
_DPI = 130
# Maximum number of links in one column of panels; with more, there are two columns.
_MAX_ROWS = 24


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
        paths.append(draw_curves(run.summary, phases, run.folder / "learning-curves.png", own))
    if run.summary.bytes.by_link:
        paths.append(draw_bytes(run.summary, run.phases, run.folder / "bytes.png"))
    if any(party.times for party in run.summary.parties):
        paths.append(save(times_of(run.summary, run.phases), run.folder / "times.png"))
    if run.summary.worth is not None:
        paths.append(save(worth_of(run.summary, run.summary.worth), run.folder / "worth.png"))
    return paths


def draw_curves(
    summary: Summary,
    phases: Mapping[str, Rounds],
    path: Path,
    own: Mapping[str, Mapping[str, Rounds]] = NOBODY,
) -> Path:
    """Draws what ``curves_of`` returns. Returns ``path``."""
    return save(curves_of(summary, phases, own), path)


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
    figure = NotebookFigure(figsize=(5.2 * columns, 0.9 + 3.5 * len(drawn)), layout="constrained")
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
    figure.suptitle(f"{summary.run_id}\n{_final(summary)}", fontsize="medium", x=0.01, ha="left")
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
    axes.spines[["top", "right"]].set_visible(False)


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


def draw_bytes(summary: Summary, phases: Sequence[str], path: Path) -> Path:
    """Draws a panel for each phase with a bar for each link and direction, payload and envelope.

    Returns ``path``.
    """
    panels = [(name, _bars(summary, name)) for name in in_order(summary, phases)]
    columns = 2 if sum(len(bars) for _, bars in panels) > _MAX_ROWS and len(panels) > 1 else 1
    rows = math.ceil(len(panels) / columns)
    tallest = [
        max(len(bars) for _, bars in panels[r * columns : (r + 1) * columns]) for r in range(rows)
    ]
    heights = [0.27 * count + 0.85 for count in tallest]
    figure = Figure(figsize=(8.2 * columns, sum(heights) + 0.9), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    cells = list(grid.flat)
    for axes, (name, bars) in zip(cells, panels, strict=False):
        _panel(axes, name, bars)
    for axes in cells[len(panels) :]:
        axes.axis("off")
    total = summary.bytes.total
    envelope = total.message_bytes - total.payload_bytes
    text = (
        f"{size(total.payload_bytes)} of tensors (payload), {size(envelope)} around them "
        f"(envelope); TLS not counted{'; each panel has its own scale' if len(panels) > 1 else ''}"
    )
    figure.suptitle(f"{summary.run_id}\n{text}", fontsize="medium", x=0.01, ha="left")
    handles, labels = cells[0].get_legend_handles_labels()
    # Placed below, because the title is too wide to share its line.
    figure.legend(handles, labels, loc="outside lower right", ncols=2, frameon=False)
    return save(figure, path)


def _bars(summary: Summary, phase: str) -> list[tuple[str, int, int]]:
    """Returns (link, payload bytes, envelope bytes) of one phase: links to the active party first,
    then its answers.
    """
    roles = {party.name: party.role for party in summary.parties}
    order = {party.name: place for place, party in enumerate(summary.parties)}
    sums: dict[tuple[str, str], list[int]] = {}
    for link in summary.bytes.by_link:
        if link.phase == phase:
            count = sums.setdefault((link.sender, link.receiver), [0, 0])
            count[0] += link.payload_bytes
            count[1] += _envelope(link)
    hub = "server" if any("server" in (roles.get(a), roles.get(b)) for a, b in sums) else "active"

    def place(key: tuple[str, str]) -> tuple[bool, int, int]:
        sender, receiver = key
        return roles.get(sender) == hub, order.get(sender, 0), order.get(receiver, 0)

    return [(" → ".join(key), sums[key][0], sums[key][1]) for key in sorted(sums, key=place)]


def _envelope(link: LinkBytes) -> int:
    return link.message_bytes - link.payload_bytes


def _panel(axes: Axes, phase: str, bars: Sequence[tuple[str, int, int]]) -> None:
    largest = max((payload + envelope for _, payload, envelope in bars), default=1) or 1
    factor, unit = next(
        ((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= f), (1.0, "bytes")
    )
    places = range(len(bars))
    payloads = [payload / factor for _, payload, _ in bars]
    envelopes = [envelope / factor for _, _, envelope in bars]
    axes.barh(places, payloads, color=_BLUE, label="payload", height=0.7)
    axes.barh(places, envelopes, left=payloads, color=_ORANGE, label="envelope", height=0.7)
    for place, (_, payload, envelope) in zip(places, bars, strict=True):
        total = payload + envelope
        text = size(total) + (f", {envelope / total:.1%} envelope" if payload else "")
        axes.annotate(
            text,
            (total / factor, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_ylim(len(bars) - 0.5, -0.5)
    # Leaves room for the numbers.
    axes.set_xlim(0, largest / factor * 1.32)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    total = sum(payload + envelope for _, payload, envelope in bars)
    axes.set_title(f"{_TITLES.get(phase, phase)}: {size(total)}", loc="left", fontsize=10)


def save(figure: Figure, path: Path) -> Path:
    """Writes a figure as PNG. Returns ``path``. Raises InputError if it cannot be written."""
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise write_error(path, error) from None
    return path
