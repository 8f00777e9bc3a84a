"""Rehearses attacks on runs of recipes, to measure what each party can infer from its messages."""

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

from vfl.jobs import check_jobs
from vfl.library.plugins import with_plugins
from vfl.library.recipe import GivenRecipe, Recipe
from vfl.library.run import Run
from vfl.simulation.federation import are_party_files
from vfl_common.config.party import Init
from vfl_common.config.recipe import name_file_in_errors
from vfl_common.config.task import COMPARED
from vfl_common.errors import Code, InputError, VflError
from vfl_leaks.result import (
    Rehearsed,
    Spread,
    as_columns,
    as_json,
    collect_drawings,
    merge_seeds,
)
from vfl_party.base.plugins import RunPlugins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vfl_leaks.orders import AttackRequest, SeedResult

    # A function that makes the run of a seed.
    _Make = Callable[[int], SeedResult]

# The metrics of utility; the first metric that a run has is used.
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
        from vfl_leaks.picture import draw

        return draw(self.found)

    def images(self) -> dict[str, bytes]:
        """Returns {file name: PNG} for each recipe and party. A PNG shows private images above
        their reconstructions.

        The dict is empty if no attack reconstructs images. ``IPython.display.Image`` shows a PNG in
        a notebook.
        """
        from vfl_leaks.picture import draw_images

        return draw_images(self.found)

    def __repr__(self) -> str:
        return (
            f"Leaks({len(self.found)} recipes, {sum(len(result.lines) for result in self.found)} "
            "figures)"
        )

    def _repr_html_(self) -> str:
        from vfl.summary.table import render_html
        from vfl_leaks.table import render

        return render_html(render(self.found))


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
    """Runs recipes on this machine, records the messages of each party, and plays attacks on them.

    Args:
        recipe: as in ``simulate``; or several recipes to compare, such as one for each defence. A
            list of paths of party files is one recipe.
        data: as in ``simulate``; the rows of all parties are needed.
        plugins: as in ``simulate``; the attacks of plug-ins are also played.
        attacks: the names of attacks; by default all attacks, including the attacks of plug-ins.
        seeds: the seeds, with one run each; by default the recipe's seed.
        every: records rounds 0, every, 2 x every, … of each phase.
        init: as in a party file: whether the parties' initial weights, dropout, orders and views
            are derived from secrets, as in a run of real parties, or from the recipe's seed. The
            secrets of a rehearsal are the same each time.
        out: the folder of the runs; without it, their files are removed at the end.
        quiet: whether to show no progress.
        tell: called with the result of each recipe as soon as it is known. If a seed fails, it is
            called with the result of the seeds before.
        jobs: the number of runs at a time, each in a separate process if greater than 1.
        backend: the joblib backend that makes the runs; None: processes of this machine.

    Raises VflError: invalid input, or a run that failed.
    """
    with with_plugins(plugins):
        recipes = _recipes(recipe)
        out_folder = Path(out) if out is not None else None
        jobs = check_jobs(jobs)
        plan = _Plan(data or {}, seeds, every, init, out_folder, quiet, jobs, backend)
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
    from vfl_leaks import attacks as kinds
    from vfl_leaks.orders import AttackRequest

    loaded = [Recipe.of(recipe_) for recipe_ in recipes]
    names = list(attacks) if attacks is not None else kinds.REGISTRY.names()
    for name in names:
        kinds.load(name, "attacks")
    unsupported = {recipe_.settings.task.kind for recipe_ in loaded} & {"multilabel", *COMPARED}
    if unsupported:
        raise InputError(
            Code.CONFIG_INVALID,
            "leaks: the task must have one class or number per row (got "
            f"{unsupported.pop()}). Give a recipe with such a task.",
        )
    if plan.every < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"every: must be at least 1 (got {plan.every}). Set a positive number.",
        )
    if plan.seeds is not None and not plan.seeds:
        raise InputError(Code.CONFIG_INVALID, "seeds: must not be empty. Give at least one seed.")
    for what, values in (("attacks", names), ("seeds", [*map(str, plan.seeds or [])])):
        duplicate = next((value for value in values if values.count(value) > 1), None)
        if duplicate is not None:
            raise InputError(
                Code.CONFIG_INVALID, f"{what}: contains {duplicate} more than once. Name each once."
            )
    _refuse_duplicates([Path(path_) for path_ in recipes if isinstance(path_, str | Path)])
    results = list[Rehearsed]()
    request = AttackRequest(names, plan.every, plan.init)
    runs = [(recipe_, plan.seeds_of(recipe_)) for recipe_ in loaded]
    with _make_functions(runs, plan, request) as makers:
        for label, source, (_, seeds), make in zip(
            _labels(recipes, loaded), recipes, runs, makers, strict=True
        ):
            several = sum(len(run_seeds) for _, run_seeds in runs) > 1 and not plan.quiet
            path = Path(source) if isinstance(source, str | Path) else None
            with name_file_in_errors(path) if path is not None else contextlib.nullcontext():
                for result in _rehearse(label, seeds, make, plan, several=several):
                    results.append(result)
                    if tell is not None:
                        tell(result)
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
def _make_functions(
    runs: Sequence[tuple[Recipe, Sequence[int]]], plan: _Plan, request: AttackRequest
) -> Iterator[list[_Make]]:
    """Yields for each recipe a function that returns the result of a seed's run.

    Without jobs, the function makes the run in this process. With jobs, all runs are submitted to
    other processes, and the function waits for the result. At the end, runs that have not started
    are cancelled.
    """
    from vfl_leaks.orders import make_here

    with _open_folder(plan.out) as out_folder:
        jobs = min(plan.jobs, sum(len(seeds) for _, seeds in runs))
        if jobs <= 1 and plan.backend is None:
            tell = _ignore_text if plan.quiet else _print_text

            def make_run(recipe: Recipe, seed: int) -> SeedResult:
                seeded = recipe.replace(seed=seed)
                return make_here(
                    seeded, plan.data, out_folder, request, quiet=plan.quiet, tell=tell
                )

            yield [partial(make_run, recipe) for recipe, _ in runs]
            return
        from vfl.jobs import open_pool, open_waiting_threads
        from vfl_leaks.orders import MAKES, make_in_pool

        with (
            open_pool(MAKES, jobs, 1, plan.backend) as workers,
            open_waiting_threads(workers, jobs) as threads,
        ):

            def make_remote_run(recipe: Recipe, seed: int) -> SeedResult:
                return make_in_pool(
                    workers, recipe.replace(seed=seed), plan.data, out_folder, request
                )

            # A thread does not inherit the context variables of this one.
            futures = [
                {
                    seed: threads.submit(copy_context().run, make_remote_run, recipe, seed)
                    for seed in seeds
                }
                for recipe, seeds in runs
            ]
            yield [partial(_get_result, by_seed) for by_seed in futures]


def _get_result(futures: Mapping[int, Future[SeedResult]], seed: int) -> SeedResult:
    return futures[seed].result()


def _rehearse(
    label: str,
    seeds: Sequence[int],
    make: _Make,
    plan: _Plan,
    *,
    several: bool,
) -> Iterator[Rehearsed]:
    """Yields the result of a recipe's runs. If a run fails, it yields the result of the runs before
    it, and then raises VflError.

    ``several``: whether to print the name of each run when it starts.
    """
    results: list[SeedResult] = []
    failed: VflError | None = None
    for seed in seeds:
        if several:
            _print_text(f"{label}, seed {seed}")
        try:
            results.append(make(seed))
        except VflError as error:
            failed = error
            break
    if results:
        lines, notes = merge_seeds([part.played for part in results])
        runs, last = [part.run for part in results], results[-1]
        metric, utility = _find_utility(runs)
        sent = sum(run.bytes.total.payload_bytes for run in runs) // len(runs)
        yield Rehearsed(
            label,
            tuple(seeds[: len(results)]),
            metric,
            utility,
            sent,
            lines,
            notes,
            last.sizes,
            last.gaps,
            plan.every,
            last.times,
            collect_drawings(last.played),
        )
    if failed is not None:
        raise failed


def _refuse_duplicates(paths: Sequence[Path]) -> None:
    """Raises InputError if two paths name the same file, because their runs would be the same."""
    resolved = [path.resolve() for path in paths]
    duplicate = next(
        (path for number, path in enumerate(paths) if resolved[number] in resolved[:number]), None
    )
    if duplicate is not None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{duplicate}: this recipe is given more than once. Name each recipe once.",
        )


def _labels(recipes: Sequence[GivenRecipe], loaded: Sequence[Recipe]) -> list[str]:
    """Returns a label for each recipe: its name. If several recipes have the same name, the label
    is the file, or the name and a number.
    """
    names = [recipe.name for recipe in loaded]
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


def _ignore_text(_text: str) -> None:
    return


def _print_text(text: str) -> None:
    from rich.console import Console

    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def _find_utility(runs: Sequence[Run]) -> tuple[str, Spread | None]:
    """Returns the name of the first metric in ``_GOOD`` that all runs have, and its values."""
    for split in _SPLITS:
        for name in _GOOD:
            values = [run.metrics.get(split, {}).get(name) for run in runs]
            if None not in values:
                return f"{split} {name}", Spread.of(values)
    return "", None


@contextlib.contextmanager
def _open_folder(out: str | Path | None) -> Iterator[Path]:
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="vfl-") as folder:
        yield Path(folder)
