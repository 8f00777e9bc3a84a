"""The tables and the heat map of ``benchmarks.missing``, from its JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.missing_rows import TEACHER, WAYS

Found = Mapping[str, Any]
# {(task, rate in training, way): of each rate in the test, a value for each seed, in points}.
Cells = dict[tuple[str, str, str], list[list[float]]]
TASKS = {"credit": "AUC", "phishing": "accuracy", "UJI": "accuracy", "MNIST-10k": "accuracy"}
LIBRARY = "library"
DPI = 80
# Of the normal distribution, for intervals of 95 %.
Z = 1.96


def write(done: Found, path: Path, rates: Sequence[float]) -> None:
    """Writes the tables as Markdown, and the heat map as PNG, beside the JSON ``path``."""
    cells = _cells(done)
    text = "\n".join([*_grid(cells, rates), "", *_claims(cells, rates), "", *_promises(done)])
    path.with_suffix(".md").write_text(text + "\n")
    _draw(cells, rates, path.with_suffix(".png"))


def _cells(done: Found) -> Cells:
    found: Cells = {}
    for key, value in done.items():
        task, rate, _ = key.split("/")
        ways = value["test"] if rate == LIBRARY else value
        for way, qualities in ways.items():
            cell = found.setdefault((task, rate, way), [[] for _ in qualities])
            for at, quality in zip(cell, qualities, strict=True):
                at.append(100 * quality)
    return found


def _grid(cells: Cells, rates: Sequence[float]) -> Iterator[str]:
    """Yields a table for each task: missing rates in training, and in the test."""
    for task, metric in TASKS.items():
        yield f"**{task}** ({metric}, %)"
        yield ""
        yield _row(["missing in training", "seeds", "in the test", *WAYS])
        yield _row(["---"] * (3 + len(WAYS)))
        for a in (*rates, LIBRARY):
            for b, rate in enumerate(rates):
                found = [cells.get((task, str(a), way), []) for way in WAYS]
                seeds = max((len(each[b]) for each in found if each), default=0)
                if not seeds:
                    continue
                means = [_mean(each[b]) if each else "" for each in found]
                # The library's own training, with all rows.
                where = _percent(a) if isinstance(a, float) else "0 %, by the library"
                yield _row([where, str(seeds), _percent(rate), *means])
        yield ""


def _claims(cells: Cells, rates: Sequence[float]) -> Iterator[str]:
    """Yields the differences that issue 47 asks for, seed by seed and then as a mean."""
    heads = [
        "task",
        "seeds",
        "subsets − plain, nobody missing",
        f"subsets − plain with zeros, {_percent(rates[-1])} missing in the test",
        "the least subsets − alone in the grid",
    ]
    yield _row(heads)
    yield _row(["---"] * len(heads))
    for task in TASKS:
        of = {key[1:]: value for key, value in cells.items() if key[0] == task}
        subsets, plain = of["0.0", "subsets"], of["0.0", "plain, zeros"]
        least = min(
            (
                _less(of[str(a), "subsets"][b], of[str(a), "alone"][b])
                for a in rates
                for b in range(len(rates))
            ),
            key=statistics.fmean,
        )
        shown = (_less(subsets[0], plain[0]), _less(subsets[-1], plain[-1]), least)
        seeds = str(len(subsets[0]))
        yield _row([task, seeds, *(_mean(each, sign="+") for each in shown)])


def _promises(done: Found) -> Iterator[str]:
    """Yields how far promises were from fresh rows, over sets of parties and seeds."""
    heads = ["task", "trained", "seeds", "sets", "mean distance", "largest", "within 1 point"]
    heads += ["within 1 point or the interval"]
    yield _row(heads)
    yield _row(["---"] * len(heads))
    for task, metric in TASKS.items():
        runs = [each for key, each in done.items() if key.startswith(f"{task}/{LIBRARY}/")]
        for way in runs[0]["sets"] if runs else ():
            pairs = [(pair, run["rows"]) for run in runs for pair in run["sets"][way].values()]
            apart = [100 * abs(promised - found) for (promised, found), _ in pairs]
            near = [each <= 1 for each in apart]
            # Of a share of rows; an AUC has no such simple interval.
            known = metric == "accuracy"
            inside = [
                each <= 1 or (known and each <= 100 * _interval(promised, rows))
                for each, ((promised, _), rows) in zip(apart, pairs, strict=True)
            ]
            counts = [str(len(runs)), str(len(apart))]
            far = [f"{statistics.fmean(apart):.2f}", f"{max(apart):.2f}"]
            shares = [f"{sum(each)} of {len(each)}" for each in (near, inside)]
            yield _row([task, way, *counts, *far, *shares])


def _interval(share: float, rows: Sequence[int]) -> float:
    """Returns half the width of the 95 % interval of the difference of two shares of rows."""
    return Z * math.sqrt(share * (1 - share) * sum(1 / each for each in rows))


def _less(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(values, others, strict=True)]


def _mean(values: Sequence[float], sign: str = "") -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):{sign}.1f} ± {spread:.1f}".replace("-", "−")


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f} %"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _draw(cells: Cells, rates: Sequence[float], path: Path) -> None:
    figure = Figure(figsize=(11.5, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (task, metric) in zip(figure.subplots(2, 2).flat, TASKS.items(), strict=True):
        axes.set_title(f"{task}: {metric}, %", fontsize=10)
        _panel(axes, cells, task, rates)
    figure.supxlabel("missing in training, missing in the test, %", fontsize=9)
    figure.savefig(path, dpi=DPI, pil_kwargs={"optimize": True})


def _panel(axes: Axes, cells: Cells, task: str, rates: Sequence[float]) -> None:
    pairs = [(a, b) for a in rates for b in range(len(rates))]
    ways = [way for way in WAYS if way != TEACHER] + [TEACHER]
    values = [[statistics.fmean(cells[task, str(a), way][b]) for a, b in pairs] for way in ways]
    low, high = min(map(min, values)), max(map(max, values))
    axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            colour = "black" if value > (low + high) / 2 else "white"
            axes.text(x, y, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=8)
    for x in range(1, len(rates)):
        axes.axvline(x * len(rates) - 0.5, color="white", linewidth=2)
    names = [f"{100 * a:.0f}, {100 * rates[b]:.0f}" for a, b in pairs]
    axes.set_xticks(range(len(pairs)), names, fontsize=8)
    axes.set_yticks(range(len(ways)), ways, fontsize=8)
