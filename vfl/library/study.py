"""Runs a recipe with other values, one run after the other or several at a time, and compares
them.
"""

from __future__ import annotations

import contextlib
import html
import itertools
import operator
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from vfl.library.recipe import Recipe
from vfl.library.run import Run
from vfl.library.simulate import carry_out, ours, simulate
from vfl_common.errors import Code, InputError, VflError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A key of ``over`` that is none of the recipe.
_BASELINE = "baseline"
# After which Ctrl-C is seen, also if another thread got the signal.
_TICK_S = 0.2
# Drawn: the first of these that all runs have.
_GOOD = ("accuracy", "auc", "f1", "rmse", "loss")


@dataclass(frozen=True)
class Study:
    """Finished runs. ``over``: {key of the recipe: its values}; ``values``: what each of ``runs``
    had of them.
    """

    over: Mapping[str, Sequence[Any]]
    values: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...]

    def columns(self) -> dict[str, list[Any]]:
        """Returns a row a run, as columns: the keys of ``over``, ``seed``, ``validation auc``,
        ``test auc``, ….

        ``pandas.DataFrame(study.columns())`` takes them as they are; a metric that a run lacks is
        None.
        """
        found = [
            {f"{s} {n}": v for s, named in run.metrics.items() for n, v in named.items()}
            for run in self.runs
        ]
        names = dict.fromkeys(name for each in found for name in each)
        keys = dict.fromkeys(key for each in self.values for key in each)
        return {
            **{key: [each.get(key) for each in self.values] for key in keys},
            **{name: [each.get(name) for each in found] for name in names},
        }

    def plot(self, metric: str | None = None) -> Figure:
        """Draws a metric over the first key of ``over``: a line for each value of the second, the
        mean of all others.

        ``metric``: such as ``validation auc``; without it, a metric of the validation rows that all
        runs have. Raises VflError if no run has it.
        """
        from vfl.report.picture import Picture

        columns = self.columns()
        drawn = metric or self._metric(columns)
        if drawn not in columns or all(value is None for value in columns[drawn]):
            known = ", ".join(name for name in columns if " " in name)
            raise InputError(Code.CONFIG_INVALID, f"plot: no run has {drawn!r}; they have {known}")
        first, *others = self.over
        numbers = _are_numbers(self.over[first])
        figure = Picture(figsize=(6.0, 3.8), layout="constrained")
        axes = figure.subplots()
        for value in self.over[others[0]] if others else [None]:
            points = self._points(columns[drawn], first, {others[0]: value} if others else {})
            xs = [point[0] if numbers else _named(point[0]) for point in points]
            label = f"{others[0]} = {_named(value)}" if others else None
            means = [statistics.mean(ys) for _, ys in points]
            low, high = [min(ys) for _, ys in points], [max(ys) for _, ys in points]
            if numbers:
                (line,) = axes.plot(xs, means, marker="o", label=label)
                axes.fill_between(xs, low, high, alpha=0.15, color=line.get_color())
            else:
                # Nothing lies between two names, so no line does.
                below = [middle - least for middle, least in zip(means, low, strict=True)]
                above = [most - middle for middle, most in zip(means, high, strict=True)]
                axes.errorbar(xs, means, [below, above], fmt="o", capsize=3, label=label)
                axes.margins(x=0.1)
        if numbers and _spreads(self.over[first]):
            axes.set_xscale("log")
        axes.set_xlabel(first)
        axes.set_ylabel(drawn)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if others:
            axes.legend(frameon=False)
        return figure

    def _points(
        self, metrics: Sequence[Any], key: str, fixed: Mapping[str, Any]
    ) -> list[tuple[Any, list[float]]]:
        """Returns [(value of ``key``, the metric of its runs)], of the runs with the ``fixed``
        values.
        """
        found = []
        for x in self.over[key]:
            wanted = {key: x, **fixed}
            of_runs = zip(self.values, metrics, strict=True)
            ys = [
                y
                for each, y in of_runs
                if y is not None and all(each[k] == v for k, v in wanted.items())
            ]
            if ys:
                found.append((x, ys))
        return found

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
            "<tr>" + "".join(f"<td>{html.escape(_shown(value))}</td>" for value in row) + "</tr>"
            for row in zip(*columns.values(), strict=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def study(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    over: Mapping[str, Sequence[Any]],
    data: Mapping[str, Any] | None = None,
    *,
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    jobs: int = 1,
) -> Study:
    """Runs a recipe with every combination of values, each with every seed.

    Args:
        recipe: a recipe, a dict of its tables, or the path of its file.
        over: {key: values}, with keys as in ``Recipe.replace``: ``{"phases.splitnn.optimizer.lr":
            [0.001, 0.01]}``. The key ``baseline`` compares the federation with baselines, as
            ``simulate`` names them: ``{"baseline": [None, "alone", "combined", "gbdt"]}``; None is
            the federation.
        data: as in ``simulate``.
        seeds: of the recipe; its own if not given.
        out: the folder of runs, as in ``simulate``.
        quiet: whether to show nothing while it goes on.
        jobs: the number of runs at a time. With 1, they are made in this process; otherwise as many
            processes make them, each with all parties of its run in itself. The results are the
            same. Each process needs the memory of a run, and a core for each of the recipe's
            ``simulate.threads``.

    Choose by the metrics of the validation rows: what is chosen by the test rows is not tested any
    more. Raises VflError: before the first run if a combination makes no recipe, else if a run
    fails.
    """
    made = Recipe.of(recipe)
    if not all(isinstance(each, Iterable) and not isinstance(each, str) for each in over.values()):
        raise InputError(Code.CONFIG_INVALID, "over: give {key: [values]}")
    over = {
        key: each.tolist() if hasattr(each, "tolist") else list(each) for key, each in over.items()
    }
    if not over or not all(over.values()):
        raise InputError(
            Code.CONFIG_INVALID, "over: give {key: [values]}, with at least one value for each key"
        )
    if isinstance(seeds, str) or not isinstance(seeds, Iterable | None):
        raise InputError(
            Code.CONFIG_INVALID, f"seeds: give whole numbers, like [1, 2, 3], not {seeds!r}"
        )
    with_seeds = [None] if seeds is None else list(seeds)
    if not with_seeds:
        raise InputError(
            Code.CONFIG_INVALID, "seeds: give at least one, or leave it out for the recipe's own"
        )
    values = [
        dict(zip(over, chosen, strict=True)) | ({} if seed is None else {"seed": seed})
        for chosen in itertools.product(*over.values())
        for seed in with_seeds
    ]
    _check_baselines(over.get(_BASELINE, []))
    # All, before the first run.
    recipes = [made.replace(_without_baseline(each)) for each in values]
    planned = []
    for number, (each, with_values) in enumerate(zip(values, recipes, strict=True), start=1):
        which = ", ".join(f"{key} = {_named(value)}" for key, value in each.items())
        planned.append(
            _Planned(with_values, each.get(_BASELINE), f"run {number} of {len(values)}: {which}")
        )
    say = _silent if quiet else _speaker()
    # Wherever this process goes meanwhile.
    place = Path(out).absolute() if out is not None else None
    at_a_time = min(_jobs(jobs), len(planned))
    if at_a_time > 1:
        with ours():
            runs = _at_a_time(at_a_time, planned, data, place, say)
    else:
        runs = []
        for run in planned:
            say(run.title)
            with run.noting():
                runs.append(
                    simulate(run.recipe, data, baseline=run.baseline, out=place, quiet=True)
                )
    return Study(dict(over), tuple(values), tuple(runs))


@dataclass(frozen=True)
class _Planned:
    recipe: Recipe
    baseline: str | None
    title: str

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes with an error, which run it was."""
        try:
            yield
        except VflError as error:
            error.add_note(f"in {self.title}")
            raise


def _at_a_time(
    jobs: int,
    planned: Sequence[_Planned],
    data: Mapping[str, Any] | None,
    out: Path | None,
    say: Callable[[str], None],
) -> list[Run]:
    """Makes runs in ``jobs`` processes; returns them in the order of the plan. The first error ends
    all.
    """
    from vfl.library.workers import Workers

    simulate = planned[0].recipe.settings.simulate
    with Workers(jobs, simulate.threads if simulate is not None else 1) as workers:

        def make(each: _Planned) -> Run:
            say(each.title)
            with each.noting():
                return carry_out(each.recipe, data, workers.run, baseline=each.baseline, out=out)

        pool = ThreadPoolExecutor(jobs)
        made = [pool.submit(make, each) for each in planned]
        try:
            left = set(made)
            while left:
                done, left = wait(left, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
        except BaseException:
            # Also Ctrl-C.
            pool.shutdown(wait=False, cancel_futures=True)
            workers.close()
            raise
        finally:
            # Nothing waits any more: all are finished, or their processes are gone.
            pool.shutdown()
        return [each.result() for each in made]


def _jobs(given: Any) -> int:
    number = given if isinstance(given, SupportsIndex) and not isinstance(given, bool) else 0
    if operator.index(number) < 1:
        raise InputError(Code.CONFIG_INVALID, f"jobs: give a whole number from 1, not {given!r}")
    return operator.index(number)


def _silent(_text: str) -> None: ...


def _speaker() -> Callable[[str], None]:
    """Returns what writes a line to standard error, ready at once: threads that import would
    overtake each other.
    """
    from rich.console import Console

    return partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)


def _check_baselines(named: Iterable[Any]) -> None:
    from vfl.simulation.baselines import BASELINES

    for each in named:
        if each is not None and each not in BASELINES:
            text = (
                f"there is no baseline {each!r}; give None, for the federation, or one of "
                f"{', '.join(BASELINES)}"
            )
            raise InputError(Code.CONFIG_INVALID, f"over: {text}")


def _without_baseline(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != _BASELINE}


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _named(value: Any) -> str:
    """Names a value on an axis; None is the federation, which is no baseline."""
    return "federation" if value is None else str(value)


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _spreads(values: Sequence[Any]) -> bool:
    """Whether numbers are better read on a logarithmic axis."""
    return bool(min(values) > 0 and max(values) >= 20 * min(values))
