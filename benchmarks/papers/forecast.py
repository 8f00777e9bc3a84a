"""Forecasts how long a table takes, from two short runs of each data set.

The short runs have the networks and images of the scale, few rows, and one and 21 passes. Their
difference is the time of a row; the rest is what a run takes without rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.papers.describe import Data, Line, OfData, Scale, Table, Tables, phases_of, run_at
from benchmarks.papers.plan import methods, variants, work
from benchmarks.papers.run import Filled, Runner
from vfl_papers.prepare import load

_ROWS = 400
_PASSES = (1, 21)
# Keys of a phase that say how long it is.
_LENGTHS = ("epochs", "rounds", "steps", "trees", "least_steps", "max_bytes")


def forecast(name: str, table: Table, runner: Runner) -> Iterator[tuple[str, float]]:
    """Yields (data set, seconds of all runs one after the other) of those that can be run.

    ``runner``: how the runs are made; its folder of runs is not used.
    """
    for data in run_at(table, runner.scale).data:
        one = replace(table, data=(data,))
        times, works = [], []
        for passes in _PASSES:
            short = shortened(one, passes)
            with tempfile.TemporaryDirectory(prefix="vfl-") as folder:
                filled: Filled = replace(runner, out=Path(folder)).fill(name, short, [1])
            times.append(filled.seconds)
            works.append(_work(short, runner.scale, _ROWS))
        if not times[0]:
            continue
        a_pass = max(0.0, (times[1] - times[0]) / (works[1] - works[0]))
        fixed = max(0.0, times[0] - a_pass * works[0]) / _runs(short, runner.scale)
        whole = _work(one, runner.scale, load(data.prepare).rows)
        yield data.name, a_pass * whole + fixed * _runs(one, runner.scale)


def shortened(table: Table, passes: int) -> Table:
    """Returns a table with few rows and ``passes`` passes over them, one seed, and no folds."""

    def short(phases: OfData) -> Callable[[Data], list[Tables]]:
        return lambda data: [_short(phase, passes) for phase in phases_of(phases, data)]

    def line(of: Line) -> Line:
        rates: tuple[float, ...] = ()
        return replace(
            of,
            finetune=short(of.finetune) if of.finetune else (),
            pretrain=short(of.pretrain) if of.pretrain else (),
            rates=rates,
        )

    return replace(
        table,
        data=tuple(replace(each, rows=_ROWS) for each in table.data),
        lines=tuple(line(each) for each in table.lines),
        columns=tuple(
            replace(each, labels=None if each.labels is None else 40) for each in table.columns
        ),
        finetune=short(table.finetune) if table.finetune else (),
        seeds=(1,),
        folds=None,
    )


def _short(phase: Tables, passes: int) -> Tables:
    lengths = {key: passes for key in ("epochs", "rounds", "steps", "trees") if key in phase}
    if "epochs" in phase or "rounds" in phase:
        lengths.pop("steps", None)
    kept = {key: value for key, value in phase.items() if key not in _LENGTHS}
    return (
        kept | lengths | ({"batch_size": min(50, _batch(phase))} if "batch_size" in phase else {})
    )


def _batch(phase: Tables) -> int:
    size = phase["batch_size"]
    return size if isinstance(size, int) else 50


def _work(table: Table, scale: Scale, rows: int) -> float:
    return work(run_at(table, scale), scale, rows)


def _runs(table: Table, scale: Scale) -> int:
    """Returns how many runs a table has."""
    table = run_at(table, scale)
    seeds = len(table.seeds) if isinstance(table.seeds, tuple) else len(getattr(table.seeds, scale))
    folds = table.folds if isinstance(table.folds, int) else getattr(table.folds, scale, 1)
    return sum(len(methods(table, each, scale)) for each in variants(table)) * seeds * folds
