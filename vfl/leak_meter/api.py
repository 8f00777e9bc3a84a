"""Rehearses attacks on runs of recipes: what each party could read from what it receives."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.leak_meter.report.result import (
    Rehearsed,
    Spread,
    as_columns,
    as_json,
    drawings,
    over_seeds,
)
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.run import Run
from vfl.library.study import number_of_jobs
from vfl.simulation.own_files import are_party_files
from vfl_common.config.party import Init
from vfl_common.config.recipe import naming
from vfl_common.config.task import COMPARED
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl.leak_meter.part import AttackRequest, SeedResult

    # Makes the run of a seed.
    _Make = Callable[[int], SeedResult]

# Metrics of utility; the first one that a run has is used.
_GOOD = ("auc", "accuracy", "rmse", "loss")
_SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class Leaks:
    """The results of a rehearsal, one for each recipe."""

    found: tuple[Rehearsed, ...]

    def columns(self) -> dict[str, list[Any]]:
        """Returns a row for each figure, as columns that ``pandas.DataFrame`` accepts."""
        return as_columns(self.found)

    def as_json(self) -> dict[str, Any]:
        """Returns all values of all seeds."""
        return as_json(self.found)

    def plot(self) -> Figure:
        """Draws each leak over the metric; the area of a point grows with the bytes sent."""
        from vfl.leak_meter.report.picture import draw

        return draw(self.found)

    def images(self) -> dict[str, bytes]:
        """Returns {file name: PNG} with private images above their reconstructions, for each recipe
        and party.

        It is empty if no attack reconstructs images. ``IPython.display.Image`` shows a PNG in a
        notebook.
        """
        from vfl.leak_meter.report.picture import draw_images

        return draw_images(self.found)

    def __repr__(self) -> str:
        return (
            f"Leaks({len(self.found)} recipes, {sum(len(result.lines) for result in self.found)} "
            "figures)"
        )

    def _repr_html_(self) -> str:
        from vfl.leak_meter.report.table import render
        from vfl.report.table import as_html

        return as_html(render(self.found))


def leaks(
    recipe: GivenRecipe | Sequence[GivenRecipe],
    data: Mapping[str, Any] | None = None,
    *,
    plugins: RunPlugins | None = None,
    attacks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    every: int = 1,
    init: Init = "secret",
    out: str | Path | None = None,
    quiet: bool = False,
    tell: Callable[[Rehearsed], None] | None = None,
    jobs: int = 1,
    backend: str | None = None,
) -> Leaks:
    """Runs recipes on this machine, records what each party receives, and plays attacks on it.

    Args:
        recipe: as in ``simulate``; or several, such as one for each defence, to compare. A list of
            paths of party files is one recipe.
        data: as in ``simulate``; the rows of all parties are needed.
        plugins: as in ``simulate``; attacks of plug-ins are played with the others.
        attacks: the names of attacks; by default all, also those of plug-ins.
        seeds: the seeds, with one run each; by default that of the recipe.
        every: records rounds 0, every, 2 x every, … of each phase.
        init: as in a party file: whether the parties' weights, dropout, orders and views are
            derived from secrets, as in a run of parties, or from the recipe's seed. The secrets of
            a rehearsal are the same each time.
        out: the folder of the runs; without it, their files are removed at the end.
        quiet: whether to show no progress.
        tell: called with the result of each recipe as soon as it is known, also with that of the
            seeds before one that failed.
        jobs: the number of runs at a time, each in a separate process if greater than 1.
        backend: the joblib backend that makes the runs; None: processes of this machine.

    Raises VflError: invalid input, or a run that failed.
    """
    with with_plugins(plugins):
        recipes = _recipes(recipe)
        place = Path(out) if out is not None else None
        jobs = number_of_jobs(jobs)
        plan = _Plan(data or {}, seeds, every, init, place, quiet, jobs, backend)
        return _leaks(recipes, attacks, plan, tell)


def _recipes(recipes: GivenRecipe | Sequence[GivenRecipe]) -> list[GivenRecipe]:
    """Returns a list of recipes; the paths of party files together are one recipe."""
    if isinstance(recipes, Recipe | Mapping | str | Path):
        return [recipes]
    items: list[Any] = list(recipes)
    return [items] if are_party_files(items) else items


def _leaks(
    recipes: Sequence[GivenRecipe],
    attacks: Sequence[str] | None,
    plan: _Plan,
    tell: Callable[[Rehearsed], None] | None,
) -> Leaks:
    from vfl.leak_meter import attacks as kinds
    from vfl.leak_meter.part import AttackRequest

    made = [Recipe.of(recipe_) for recipe_ in recipes]
    names = list(attacks) if attacks is not None else kinds.REGISTRY.names()
    for name in names:
        kinds.load(name, "attacks")
    odd = {recipe_.settings.task.kind for recipe_ in made} & {"multilabel", *COMPARED}
    if odd:
        raise InputError(
            Code.CONFIG_INVALID,
            f"leaks: the task must have one class or number per row (got {odd.pop()}). Give a "
            "recipe "
            "with such a task.",
        )
    if plan.every < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"every: must be at least 1 (got {plan.every}). Set a positive number.",
        )
    if plan.seeds is not None and not plan.seeds:
        raise InputError(Code.CONFIG_INVALID, "seeds: must not be empty. Give at least one seed.")
    for what, of in (("attacks", names), ("seeds", [*map(str, plan.seeds or [])])):
        twice = next((value for value in of if of.count(value) > 1), None)
        if twice is not None:
            raise InputError(
                Code.CONFIG_INVALID, f"{what}: contains {twice} more than once. Name each once."
            )
    _refuse_duplicates([Path(path_) for path_ in recipes if isinstance(path_, str | Path)])
    results = list[Rehearsed]()
    asked = AttackRequest(names, plan.every, plan.init)
    runs = [(recipe_, plan.seeds_of(recipe_)) for recipe_ in made]
    with _makers(runs, plan, asked) as makers:
        for label, source, (_, seeds), make in zip(
            _labels(recipes, made), recipes, runs, makers, strict=True
        ):
            several = sum(len(own) for _, own in runs) > 1 and not plan.quiet
            path = Path(source) if isinstance(source, str | Path) else None
            with naming(path) if path is not None else contextlib.nullcontext():
                for part in _rehearse(label, seeds, make, plan, several=several):
                    results.append(part)
                    if tell is not None:
                        tell(part)
    return Leaks(tuple(results))


@dataclass(frozen=True)
class _Plan:
    """The arguments of ``leaks``."""

    data: Mapping[str, Any]
    seeds: Sequence[int] | None
    every: int
    init: Init
    out: Path | None
    quiet: bool
    jobs: int
    backend: str | None

    def seeds_of(self, recipe: Recipe) -> list[int]:
        """Returns the seeds of a recipe's runs."""
        return [recipe.settings.seed] if self.seeds is None else list(self.seeds)


@contextlib.contextmanager
def _makers(
    runs: Sequence[tuple[Recipe, Sequence[int]]], plan: _Plan, asked: AttackRequest
) -> Iterator[list[_Make]]:
    """Yields for each recipe a function that makes the run of a seed: in this process when it is
    called, or in other processes, which have all been started. Runs that have not begun at the end
    are not made.
    """
    from vfl.leak_meter.part import make_here

    with _folder(plan.out) as place:
        several = min(plan.jobs, sum(len(seeds) for _, seeds in runs))
        if several <= 1 and plan.backend is None:
            tell = _quiet if plan.quiet else _tell

            def here(recipe: Recipe, seed: int) -> SeedResult:
                made_of = recipe.replace(seed=seed)
                return make_here(made_of, plan.data, place, asked, quiet=plan.quiet, tell=tell)

            yield [partial(here, recipe) for recipe, _ in runs]
            return
        from vfl.jobs.pool import pool, waiting
        from vfl.leak_meter.orders import MAKES, make_in_pool

        with pool(MAKES, several, 1, plan.backend) as workers, waiting(workers, several) as threads:

            def there(recipe: Recipe, seed: int) -> SeedResult:
                return make_in_pool(workers, recipe.replace(seed=seed), plan.data, place, asked)

            # A thread does not inherit the context variables of this one.
            begun = [
                {seed: threads.submit(copy_context().run, there, recipe, seed) for seed in seeds}
                for recipe, seeds in runs
            ]
            yield [partial(_result_of, own) for own in begun]


def _result_of(begun: Mapping[int, Future[SeedResult]], seed: int) -> SeedResult:
    return begun[seed].result()


def _rehearse(
    label: str,
    seeds: Sequence[int],
    make: _Make,
    plan: _Plan,
    *,
    several: bool,
) -> Iterator[Rehearsed]:
    """Yields the result of a recipe's runs. If a run fails, it yields the result of those before,
    and then raises VflError.

    ``several``: whether to print which run begins.
    """
    parts: list[SeedResult] = []
    failed: VflError | None = None
    for seed in seeds:
        if several:
            _tell(f"{label}, seed {seed}")
        try:
            parts.append(make(seed))
        except VflError as error:
            failed = error
            break
    if parts:
        lines, notes = over_seeds([part.played for part in parts])
        runs, last = [part.run for part in parts], parts[-1]
        metric, utility = _utility(runs)
        sent = sum(run.bytes.total.payload_bytes for run in runs) // len(runs)
        yield Rehearsed(
            label,
            tuple(seeds[: len(parts)]),
            metric,
            utility,
            sent,
            lines,
            notes,
            last.sizes,
            last.gaps,
            plan.every,
            last.times,
            drawings(last.played),
        )
    if failed is not None:
        raise failed


def _refuse_duplicates(paths: Sequence[Path]) -> None:
    """Raises InputError if two paths name the same file, because both runs are the same."""
    whole = [path.resolve() for path in paths]
    again = next(
        (path for number, path in enumerate(paths) if whole[number] in whole[:number]), None
    )
    if again is not None:
        raise InputError(
            Code.CONFIG_INVALID, f"{again}: this recipe is given more than once. Name each once."
        )


def _labels(recipes: Sequence[GivenRecipe], made: Sequence[Recipe]) -> list[str]:
    """Returns a label for each recipe: its name, or, if several have the same name, its file, or
    its name and a number.
    """
    names = [recipe.name for recipe in made]
    if len(set(names)) == len(names):
        return names
    paths = [Path(recipe) if isinstance(recipe, str | Path) else None for recipe in recipes]
    stems = [path.stem if path is not None else None for path in paths]
    labels = []
    for number, (name, path, stem) in enumerate(zip(names, paths, stems, strict=True), 1):
        if names.count(name) == 1:
            labels.append(name)
        elif path is None:
            labels.append(f"{name} {number}")
        else:
            labels.append(str(path) if stems.count(stem) > 1 else path.stem)
    return labels


def _quiet(_text: str) -> None:
    return


def _tell(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _utility(runs: Sequence[Run]) -> tuple[str, Spread | None]:
    """Returns the name of the first metric in ``_GOOD`` that all runs have, and its values."""
    for split in _SPLITS:
        for name in _GOOD:
            values = [run.metrics.get(split, {}).get(name) for run in runs]
            if None not in values:
                return f"{split} {name}", Spread.of(values)
    return "", None


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="vfl-") as place:
        yield Path(place)
