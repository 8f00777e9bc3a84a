"""Fills the cells of a table: runs its studies, and chooses learning rates by validation rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from benchmarks import studies
from benchmarks.papers.check import refused
from benchmarks.papers.compute import Work, order_of
from benchmarks.papers.data import Sources
from benchmarks.papers.describe import (
    Column,
    Place,
    Scale,
    Seen,
    Table,
    Tables,
    has,
    labels_of,
    run_at,
    unit_of,
)
from benchmarks.papers.plan import (
    Planned,
    Variant,
    active_of,
    base_recipe,
    methods,
    study,
    variants,
)
from vfl.jobs import open_pool, open_waiting_threads
from vfl.library.simulate import open_run_maker, run_files
from vfl_common.errors import VflError
from vfl_common.summary import load_summary
from vfl_lab.studies.report import FineTuned
from vfl_lab.studies.run import Make, StudyFailed

# Carries out what ``order_of`` orders.
_COMPUTES = "benchmarks.papers.compute:computed"


@dataclass
class Filled:
    """What was found of a table.

    ``rates``: the learning rate that was chosen for a cell. ``absent``: {data: why it was not
    run}; ``left_out``: {line: why}. ``notes``: {data: how it differs from the official one}.
    ``seconds``: of all runs, one after the other.
    """

    values: dict[Place, tuple[float, ...]] = field(default_factory=dict)
    rates: dict[Place, float] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Runner:
    """How tables are run. ``out``: the folder of runs; ``jobs``: how many runs at a time;
    ``backend``: as in ``vfl study``.
    """

    scale: Scale
    sources: Sources
    out: Path
    jobs: int
    say: Callable[[str], None]
    backend: str | None = None

    def fill(self, name: str, table: Table, seeds: Sequence[int]) -> Filled:
        """Runs what is left of a table; returns all that it has."""
        filled, table = Filled(), run_at(table, self.scale)
        if table.compute is not None:
            self._compute(name, table, seeds, filled)
            return filled
        with self._making() as make:
            for variant in variants(table):
                if variant.data.name in filled.absent:
                    continue
                try:
                    given = self.sources.base(variant, self.scale)
                except VflError as error:
                    filled.absent[variant.data.name] = str(error)
                    continue
                filled.notes.setdefault(variant.data.name, given.notes)
                self._variant(name, table, variant, seeds, given.tables, make, filled)
        return filled

    @contextlib.contextmanager
    def _making(self) -> Iterator[Make]:
        """Yields what makes a run with all of its parties in one process: this one, or one of
        ``jobs``, which a backend may have.
        """
        if self.jobs == 1 and self.backend is None:
            yield run_files
            return
        with open_run_maker(self.jobs, self.backend) as make:
            yield make

    def _compute(self, name: str, table: Table, seeds: Sequence[int], filled: Filled) -> None:
        assert table.compute is not None
        began_s = time.monotonic()
        folder = self.out / f"{name}-{self.scale}"
        work = Work(self.scale, seeds, folder, self.sources, self.say)
        if (self.jobs > 1 and len(seeds) > 1) or self.backend is not None:
            self._ahead(name, work)
        try:
            for place, values in table.compute(work):
                filled.values[place] = tuple(values)
        except VflError as error:
            filled.absent |= {each.name: str(error) for each in table.data}
        filled.notes = work.notes
        filled.absent |= work.absent
        filled.seconds = time.monotonic() - began_s

    def _ahead(self, name: str, work: Work) -> None:
        """Lets other processes find, a seed each, what the table keeps by ``Work.once``."""
        several = min(self.jobs, len(work.seeds))
        with (
            open_pool(_COMPUTES, several, 1, self.backend) as workers,
            open_waiting_threads(workers, several) as threads,
        ):
            for _ in threads.map(workers.run, [order_of(name, work, s) for s in work.seeds]):
                pass

    def _variant(
        self,
        name: str,
        table: Table,
        variant: Variant,
        seeds: Sequence[int],
        given: Tables,
        make: Make,
        filled: Filled,
    ) -> None:
        """Runs the study of a variant, and adds its cells."""
        out = refused(table, variant, self.scale, given)
        several = sum(each.data.name == variant.data.name for each in variants(table)) > 1
        at = f" ({', '.join(each.name for each in variant.columns)})" if several else ""
        filled.left_out |= {f"{line}{at}": why for line, why in out.items()}
        every = methods(table, variant, self.scale, active_of(given))
        planned = [each for each in every if each.line.name not in out]
        if not planned:
            return
        title = f"{variant.name(name)}-{self.scale}"
        written = study(table, variant, self.scale, seeds, planned)
        folds = table.folds is not None
        base = base_recipe(title, variant, self.scale, given, folds=folds)
        try:
            done = studies.run(title, base, written, self.out, self.jobs, make)
            results, folder = done.results, done.folder
        except VflError as error:
            results = error.results if isinstance(error, StudyFailed) else []
            folder = self.out / title
            filled.left_out[f"{variant.data.name}{at}: some runs"] = str(error)
        filled.seconds += _seconds(results)
        for column in variant.columns:
            for line in dict.fromkeys(each.line.name for each in planned):
                lines = [each for each in planned if each.line.name == line]
                if has(lines[0].line, variant.data, column):
                    _add(filled, variant, column, lines, results, folder, self.scale, table)


def _seconds(results: Sequence[FineTuned]) -> float:
    """Returns the seconds of all runs; a pretraining counts once."""
    runs = {each.finetune.run: each.finetune.seconds for each in results}
    runs |= {each.pretrain.run: each.pretrain.seconds for each in results}
    return sum(runs.values())


def _add(
    filled: Filled,
    variant: Variant,
    column: Column,
    lines: Sequence[Planned],
    results: Sequence[FineTuned],
    folder: Path,
    scale: Scale,
    table: Table,
) -> None:
    """Adds a cell: the values of the rate that is best on validation rows, in the paper's unit.
    ``lines``: one for each rate.
    """
    labels = labels_of(column, variant.data, scale)
    found = {
        each.rate: [r for r in results if (r.method, r.labels) == (each.name, labels)]
        for each in lines
    }
    found = {rate: runs for rate, runs in found.items() if runs}
    if not found:
        return
    metric = variant.data.metric
    rate = next(iter(found))
    if len(found) > 1:
        pick = min if variant.data.lower else max
        rate = pick(found, key=lambda each: _validated(found[each], metric))
    place = (variant.data.name, lines[0].line.name, column.name)
    seen = [
        Seen(
            run,
            folder / run.finetune.run,
            load_summary(_summary(folder, run)),
            metric,
            variant.data.settings,
        )
        for run in found[rate]
    ]
    values = [column.measure(each) for each in seen]
    unit = unit_of(table, variant.data, column)
    if kept := tuple(unit * each for each in values if each is not None):
        filled.values[place] = kept
    if rate is not None and len(lines) > 1:
        filled.rates[place] = rate


def _summary(folder: Path, run: FineTuned) -> Path:
    return folder / run.finetune.run / "summary.json"


def _validated(runs: Sequence[FineTuned], metric: str) -> float:
    return fmean(run.metrics["validation"][metric] for run in runs)
