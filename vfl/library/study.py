"""Runs a recipe with other values, one run after the other or several at a time, and compares
them.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from vfl.library import cells
from vfl.library.data import with_data
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.run import Run
from vfl.library.simulate import carry_out, ours, simulate
from vfl.studies.kept import Fingerprints, FinishedRuns, inputs_of
from vfl.studies.lines import format_axis_value
from vfl.studies.paired import Difference, difference, overlap_of
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The key of ``over`` that is not a key of the recipe.
_BASELINE = "baseline"
# The longest wait for Ctrl-C, if another thread got the signal.
_TICK_S = 0.2
# The metric to draw: the first of these that all runs have.
_GOOD = ("accuracy", "auc", "f1", "rmse", "loss")


@dataclass(frozen=True)
class Study:
    """Finished runs.

    ``over``: {key of the recipe: its values}; ``values``: those of each of ``runs``; ``plugins``:
    those of the call.
    """

    over: Mapping[str, Sequence[Any]]
    values: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...]
    plugins: RunPlugins | None = None

    def columns(self) -> dict[str, list[Any]]:
        """Returns a row a run, as columns: the keys of ``over``, ``seed``, ``validation auc``,
        ``test auc``, ….

        ``pandas.DataFrame(study.columns())`` takes them as they are; a metric that a run lacks is
        None.
        """
        metrics = [
            {f"{s} {n}": v for s, named in run.metrics.items() for n, v in named.items()}
            for run in self.runs
        ]
        names = dict.fromkeys(name for row in metrics for name in row)
        keys = dict.fromkeys(key for values in self.values for key in values)
        return {
            **{key: [values.get(key) for values in self.values] for key in keys},
            **{name: [row.get(name) for row in metrics] for name in names},
        }

    def compare(self, first: Any, second: Any, metric: str) -> Difference:
        """Compares two values of a study, by the differences of their runs with the same seed and
        fold.

        Args:
            first: a value of the only key of ``over``; of several, {key: value} with all of them.
            second: the value to compare it with.
            metric: of the validation or test rows, such as ``test auc``.

        Returns the mean difference, its interval of 95 % confidence, and whether the first is
        better; its text is the whole result. With fewer than three pairs of runs there is no
        interval. The
        (Nadeau and Bengio 2003). One interval of many is likely to miss: correct several with
        ``vfl.studies.paired.holm``, or choose by validation rows and compare by test rows once.
        Raises VflError.
        """
        from vfl_party.models.metrics import lower_is_better

        columns = self.columns()
        split, _, name = metric.partition(" ")
        if split not in ("validation", "test") or metric not in columns:
            known = [name for name in columns if name.startswith(("validation ", "test "))]
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: no run has the metric {metric!r}. Choose one of "
                f"{', '.join(known) or 'none'}.",
            )
        ours_, theirs = self._runs_of(first), self._runs_of(second)
        pairs = [
            (columns[metric][ours_[at]], columns[metric][theirs[at]])
            for at in ours_
            if at in theirs
        ]
        pairs = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not pairs:
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: no seed has runs of both values with {metric!r}. Run both with the "
                "same seeds.",
            )
        recipe = self.runs[next(iter(ours_.values()))].settings
        with with_plugins(self.plugins):
            lower = lower_is_better(recipe.task, name)
        return difference(
            metric,
            *zip(*pairs, strict=True),
            overlap=overlap_of(recipe, split),
            lower_is_better=lower,
        )

    def _runs_of(self, chosen: Any) -> dict[tuple[Any, ...], int]:
        """Returns {(seed, fold): number of the run} of the runs with the chosen values."""
        keys = list(self.over)
        if len(keys) == 1 and chosen in list(self.over[keys[0]]):
            chosen = {keys[0]: chosen}
        if not isinstance(chosen, Mapping) or set(chosen) != set(keys):
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: the study has no such value (got {chosen!r}). Give a value of "
                f"{keys[0]} that the study has."
                if len(keys) == 1
                else f"compare: must have a value for each key (got {chosen!r}). Give {{key: "
                f"value}} with {', '.join(keys)}.",
            )
        runs = {
            (values.get("seed"), values.get("fold")): number
            for number, values in enumerate(self.values)
            if all(values[key] == value for key, value in chosen.items())
        }
        if not runs:
            raise InputError(
                Code.CONFIG_INVALID,
                f"compare: the study has no run with {_of_values(chosen)}. Give values that the "
                "study has.",
            )
        return runs

    def plot(self, metric: str | None = None) -> Figure:
        """Draws a metric over the first key of ``over``: a line for each value of the second, the
        mean of all others.

        ``metric``: such as ``validation auc``; without it, a metric of the validation rows that all
        runs have. Raises VflError if no run has it.
        """
        from vfl.studies.lines import draw_values

        columns = self.columns()
        drawn = metric or self._metric(columns)
        if drawn not in columns or all(value is None for value in columns[drawn]):
            known = ", ".join(name for name in columns if " " in name)
            raise InputError(
                Code.CONFIG_INVALID,
                f"plot: no run has the metric {drawn!r}. Choose one of {known}.",
            )
        return draw_values(self.over, self.values, drawn, columns[drawn])

    def _metric(self, columns: Mapping[str, Sequence[Any]]) -> str:
        whole = [name for name, values in columns.items() if None not in values]
        for split in ("validation", "train", "test"):
            for name in _GOOD:
                if f"{split} {name}" in whole:
                    return f"{split} {name}"
        return "validation accuracy"

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Run]]:
        return iter(zip(self.values, self.runs, strict=True))

    def __repr__(self) -> str:
        return f"Study({len(self)} runs over {', '.join(self.over)})"

    def _repr_html_(self) -> str:
        columns = self.columns()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_format(value))}</td>" for value in row) + "</tr>"
            for row in zip(*columns.values(), strict=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def study(
    recipe: GivenRecipe,
    over: Mapping[str, Sequence[Any]],
    data: Mapping[str, Any] | None = None,
    *,
    plugins: RunPlugins | None = None,
    seeds: Sequence[int] | None = None,
    folds: int | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    jobs: int = 1,
    backend: str | None = None,
) -> Study:
    """Runs a recipe with every combination of values, each with every seed.

    Args:
        recipe: as in ``simulate``.
        over: {key: values}, with keys as in ``Recipe.replace``: ``{"phases.splitnn.optimizer.lr":
            [0.001, 0.01]}``. The key ``baseline`` compares the federation with baselines, as
            ``simulate`` names them: ``{"baseline": [None, "alone", "combined", "gbdt"]}``; None is
            the federation.
        data: as in ``simulate``.
        plugins: as in ``simulate``; with ``jobs``, only objects that other processes can import.
        seeds: of the recipe; its own if not given.
        folds: for cross-validation: each of so many parts of the rows is for testing once, with
            every combination and seed; it takes the place of ``rows.test``.
        out: the folder of runs, as in ``simulate``. What a study has finished there is not run
            again, by the same study or by another one: runs with the same recipe, baseline and
            rows. Files count by their size and time; a database, and the code of modules, count by
            name, so take another folder when these change. Runs with ``plugins``, or with an
            encoder of this notebook or script, are always made again.
        quiet: whether to show nothing while it goes on.
        jobs: the number of runs at a time. With 1, they are made in this process; otherwise as many
            processes make them, each with all parties of its run in itself. The results are the
            same. Each process needs the memory of a run, and a core for each of the recipe's
            ``simulate.threads``.
        backend: the name of a backend of joblib, whose processes make the runs instead: ``loky``,
            on this machine; ``dask``, wherever the connected ``Client`` has workers; or another one
            that is registered. On several machines, ``out``, the files of rows and the modules
            must be at the same paths on all of them.

    Choose by the metrics of the validation rows: a choice by the test rows biases their metrics.
    Raises VflError: before the first run if a combination is not a valid recipe, otherwise if a
    run fails.
    """
    made = Recipe.of(recipe)
    if not all(isinstance(v, Iterable) and not isinstance(v, str) for v in over.values()):
        raise InputError(Code.CONFIG_INVALID, "over: values must be lists. Give {key: [values]}.")
    over = {key: v.tolist() if hasattr(v, "tolist") else list(v) for key, v in over.items()}
    if not over or not all(over.values()):
        raise InputError(
            Code.CONFIG_INVALID, "over: is empty. Give {key: [values]}, with a value for each key."
        )
    if "fold" in over:
        raise InputError(
            Code.CONFIG_INVALID,
            "over: fold is not a key. Give folds, or the keys rows.folds and rows.fold.",
        )
    if isinstance(seeds, str) or not isinstance(seeds, Iterable | None):
        raise InputError(
            Code.CONFIG_INVALID,
            f"seeds: must be integers (got {seeds!r}). Give a list like [1, 2, 3].",
        )
    with_seeds = [None] if seeds is None else list(seeds)
    if not with_seeds:
        raise InputError(
            Code.CONFIG_INVALID,
            "seeds: is empty. Give a seed, or leave it out for the recipe's own.",
        )
    if "seed" in over and seeds is not None:
        raise InputError(
            Code.CONFIG_INVALID, "over: seed is given twice. Remove it, or the argument seeds."
        )
    values = [
        dict(zip(over, chosen, strict=True))
        | ({} if seed is None else {"seed": seed})
        | ({} if fold is None else {"fold": fold})
        for chosen in itertools.product(*over.values())
        for seed in with_seeds
        for fold in _folds(folds)
    ]
    _check_baselines(over.get(_BASELINE, []))
    # All recipes are checked before the first run.
    recipes = [_with(made, chosen, folds) for chosen in values]
    planned = []
    for number, (chosen, with_values) in enumerate(zip(values, recipes, strict=True), start=1):
        title = f"run {number} of {len(values)}: {_of_values(chosen)}"
        planned.append(_Planned(with_values, chosen.get(_BASELINE), title))
    say = _silent if quiet else speaker()
    # The process may change its folder meanwhile.
    place = Path(out).absolute() if out is not None else None
    at_a_time = number_of_jobs(jobs)
    memory = _Memory(place if plugins is None else None, data)
    finished = {n: run for n, run in enumerate(map(memory.find, planned)) if run is not None}
    left = [one for number, one in enumerate(planned) if number not in finished]
    if finished:
        say(f"{len(finished)} of {len(planned)} runs are finished already: {place}")
    runs: list[Run] = []
    with with_plugins(plugins):
        if (several := min(at_a_time, len(left))) > 1 or (left and backend is not None):
            with ours():
                runs = _at_a_time(several, backend, left, data, place, memory, say)
        else:
            for one in left:
                say(one.title)
                with one.noting():
                    runs.append(
                        simulate(one.recipe, data, baseline=one.baseline, out=place, quiet=True)
                    )
                    memory.note(one, runs[-1])
    made_now = iter(runs)
    every = tuple(finished.get(number) or next(made_now) for number in range(len(planned)))
    return Study(dict(over), tuple(values), every, plugins)


@dataclass(frozen=True)
class _Planned:
    recipe: Recipe
    baseline: str | None
    title: str

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Adds the run's title to an error."""
        try:
            yield
        except VflError as error:
            error.add_note(f"in {self.title}")
            raise


class _Memory:
    """The runs that a study has finished in a folder; without a folder, none."""

    def __init__(self, out: Path | None, data: Mapping[str, Any] | None) -> None:
        self._kept = FinishedRuns(out) if out is not None else None
        self._data, self._prints = data or {}, Fingerprints()

    def find(self, planned: _Planned) -> Run | None:
        """Returns the finished run of a plan."""
        inputs = self._inputs(planned)
        folder = self._kept.find(inputs) if self._kept is not None and inputs else None
        return Run.load(folder) if folder is not None else None

    def note(self, planned: _Planned, run: Run) -> None:
        """Notes a run that is finished now."""
        inputs = self._inputs(planned)
        if self._kept is not None and inputs:
            self._kept.note(run.folder, inputs)

    def _inputs(self, planned: _Planned) -> str | None:
        """Returns the digest of a run's inputs; None if the run is always made again."""
        recipe = planned.recipe
        if self._kept is None or cells.only_here(recipe.settings) is not None:
            return None
        with planned.noting():
            tables, frames = with_data(recipe.to_dict(), self._data)
            settings = parse(Settings, tables, "recipe")
            data = divide(settings, recipe.base)
            return inputs_of(settings, data, planned.baseline, self._prints, frames)


def _at_a_time(
    jobs: int,
    backend: str | None,
    planned: Sequence[_Planned],
    data: Mapping[str, Any] | None,
    out: Path | None,
    memory: _Memory,
    say: Callable[[str], None],
) -> list[Run]:
    """Makes runs in ``jobs`` processes, as ``pool`` has them; returns them in the order of the
    plan. The first error ends all.
    """
    from vfl.jobs.pool import pool, waiting
    from vfl.jobs.runs import MAKES
    from vfl.library.orders import send

    simulate = planned[0].recipe.settings.simulate
    threads_each = simulate.threads if simulate is not None else 1
    with pool(MAKES, jobs, threads_each, backend) as workers:

        def make(plan: _Planned) -> Run:
            say(plan.title)
            with plan.noting():
                run = carry_out(
                    plan.recipe, data, partial(send, workers), baseline=plan.baseline, out=out
                )
                memory.note(plan, run)
                return run

        with waiting(workers, jobs) as threads:
            # A new thread has its own context: copy this one's.
            made = [threads.submit(copy_context().run, make, plan) for plan in planned]
            left = set(made)
            while left:
                done, left = wait(left, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    future.result()
        return [future.result() for future in made]


def number_of_jobs(jobs: Any) -> int:
    """Reads the argument ``jobs``. Raises InputError."""
    number = jobs if isinstance(jobs, SupportsIndex) and not isinstance(jobs, bool) else 0
    if operator.index(number) < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"jobs: must be an integer of at least 1 (got {jobs!r}). Give the number of runs at "
            "a time.",
        )
    return operator.index(number)


def _folds(folds: Any) -> list[int | None]:
    if folds is None:
        return [None]
    number = folds if isinstance(folds, SupportsIndex) and not isinstance(folds, bool) else 0
    if operator.index(number) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"folds: must be an integer of at least 2 (got {folds!r}). Give the number of parts.",
        )
    return [*range(1, operator.index(number) + 1)]


def _with(recipe: Recipe, values: Mapping[str, Any], folds: int | None) -> Recipe:
    """Returns the recipe of a run. A fold takes the place of ``rows.test``."""
    ours_ = (_BASELINE, "fold")
    made = recipe.replace({key: value for key, value in values.items() if key not in ours_})
    if folds is None:
        return made
    rows = {key: value for key, value in made.to_dict().get("rows", {}).items() if key != "test"}
    return made.replace({"rows": rows | {"folds": int(folds), "fold": values["fold"]}})


def _of_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {format_axis_value(value)}" for key, value in values.items())


def _silent(_text: str) -> None: ...


def speaker() -> Callable[[str], None]:
    """Returns a function that writes a line to standard error. It imports everything now: imports
    in threads race.
    """
    from rich.console import Console

    return partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)


def _check_baselines(baselines: Iterable[Any]) -> None:
    from vfl.simulation.baselines import BASELINES

    for baseline in baselines:
        if baseline is not None and baseline not in BASELINES:
            raise InputError(
                Code.CONFIG_INVALID,
                f"over: unknown baseline {baseline!r}. Give None (the federation), or one of "
                f"{', '.join(BASELINES)}.",
            )


def _format(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
