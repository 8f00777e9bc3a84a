"""``vfl.search``: tries values of a recipe's keys, and chooses the best on the validation rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
from pydantic import Field
from rich.console import Console
from rich.table import Table

from vfl.library.recipe import Recipe
from vfl_common.config.base import Section, parse, read_tables
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import InputError
from vfl_common.text import count, to_json
from vfl_lab.searching import journal
from vfl_lab.searching.journal import KEYS, Claims
from vfl_lab.searching.trials import Search, TrialPlan, convert_trial
from vfl_lab.studies.comparison import format_axis_value
from vfl_lab.studies.run import PIPE_WIDTH, format_duration
from vfl_lab.studies.run import format_event as study_sentence

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from hashlib import sha256
from typing import get_args

from vfl.jobs import check_jobs, open_pool, open_waiting_threads
from vfl.library import cells
from vfl.library.data import add_data
from vfl.library.plugins import get_import_paths, import_plugins, with_plugins
from vfl.library.recipe import GivenRecipe
from vfl.library.simulate import Order, convert_errors
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.config.recipe import divide
from vfl_common.errors import Code, VflError
from vfl_common.files import require_folder
from vfl_lab.searching.journal import Between, list_grid_points, parse_spaces, write_spaces
from vfl_lab.searching.trials import drive, read_result
from vfl_lab.study import Fingerprints, compute_inputs_digest, make_printer
from vfl_party.base.plugins import RunPlugins, use_plugins


def search(
    recipe: GivenRecipe,
    spaces: Mapping[str, Any],
    data: Mapping[str, Any] | None = None,
    *,
    objective: str,
    runs: int,
    out: str | Path,
    by: journal.By = "tpe",
    prune: bool = True,
    seed: int = 0,
    plugins: RunPlugins | None = None,
    quiet: bool = False,
    jobs: int = 1,
    backend: str | None = None,
) -> Search:
    """Runs a recipe with different values of its keys, and returns the best by the validation rows.

    Args:
        recipe: The recipe, as in ``simulate``. Every run uses the seed of the recipe.
        spaces: {key: possible values}, with keys as in ``Recipe.replace``. The possible values are
            a list, or a range ``{"from": low, "to": high}``. A range has integers if both ends are
            integers. With ``"log": True``, its values are sampled on a logarithmic scale.
        data: The data of the parties, as in ``simulate``.
        objective: The metric on the validation rows to optimize, such as ``validation auc``.
        runs: The number of trials, including earlier trials in ``out``, and pruned and failed
            trials. A grid search has at most as many trials as there are combinations.
        out: The folder of the search. The same call resumes a search in this folder, and ``runs``
            may then be larger. Several programs that make the same call share the trials, even on
            several machines that share the folder.
        by: The sampler: ``tpe`` (tree-structured Parzen estimator, Bergstra et al. 2011),
            ``random``, or ``grid`` (every combination of lists).
        prune: Whether to end a run whose objective after a round is worse than the median of the
            finished runs at that round. This needs ``early_stopping`` in a phase of the recipe,
            so that the objective is computed in each round. The first five trials are never pruned.
        seed: The seed of the sampler.
        plugins: The plug-ins, as in ``simulate``. With ``jobs``, they must be objects that other
            processes can import.
        quiet: Whether to print no progress.
        jobs: The number of runs at the same time. With 1, the runs are made in this process;
            otherwise in ``jobs`` processes. ``random`` and ``grid`` try the same values with any
            number of jobs. The choices of ``tpe`` and the pruning depend on the runs that have
            ended.
        backend: The name of a joblib backend whose processes make the runs, as in ``study``.

    The objective cannot be a metric on the test rows, because a choice by the test rows would bias
    their metrics. Raises VflError if an argument is invalid, or if no trial finished.
    """
    print_line = make_printer() if not quiet else None

    def tell(event: dict[str, Any]) -> None:
        if print_line is not None and event["event"] != "study":
            print_line(sentence(event))

    with with_plugins(plugins):
        plan = make_plan(
            Recipe.of(recipe),
            spaces,
            data,
            Path(out),
            objective=objective,
            runs=runs,
            by=by,
            prune=prune,
            seed=seed,
        )
        return run_search(plan, data, jobs=jobs, backend=backend, tell=tell)


def make_plan(
    recipe: Recipe,
    spaces: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    out: Path,
    *,
    objective: Any,
    runs: Any,
    by: Any,
    prune: Any,
    seed: Any,
) -> TrialPlan:
    """Checks the arguments of ``search``, and returns the plan of its trials. Raises InputError."""
    parsed = parse_spaces(spaces)
    _check_arguments(objective, runs, by, seed)
    if by == "grid":
        list_grid_points(parsed)
    for key, space in parsed.items():
        for value in (space.low, space.high) if isinstance(space, Between) else space.values:
            changed_recipe = recipe.replace({key: value})
            if key.startswith("phases."):
                _check_phases(changed_recipe)
    _check_metric(recipe, objective.partition(" ")[2])
    digest = _compute_digest(recipe, data, write_spaces(parsed), [objective, by, prune, seed])
    return TrialPlan(recipe, parsed, objective, runs, out.absolute(), by, bool(prune), seed, digest)


def run_search(
    plan: TrialPlan,
    data: Mapping[str, Any] | None,
    *,
    jobs: int,
    backend: str | None,
    tell: Tell,
) -> Search:
    """Runs the remaining trials of a search, and returns the result.

    ``tell`` is called with an event at the beginning, and when a trial of any driver has ended.
    Raises VflError.
    """
    job_count = check_jobs(jobs)
    require_folder(plan.folder)
    plan.folder.mkdir(exist_ok=True)
    with journal.silence_optuna(), convert_errors():
        progress = SearchProgress(plan, tell, job_count)
        if progress.left and (job_count > 1 or backend is not None):
            drivers = min(job_count, progress.left)
            run_in_processes(plan, data, drivers, backend, progress.look)
        else:
            drive(plan, data, progress.look)
        progress.look()
        return read_result(plan)


def _check_arguments(objective: Any, runs: Any, by: Any, seed: Any) -> None:
    split, _, name = str(objective).partition(" ")
    if split != "validation" or not name:
        raise InputError(
            Code.CONFIG_INVALID,
            "objective: must be a metric on the validation rows, not the test rows (got "
            f"{objective!r}). Give one such as 'validation auc'.",
        )
    for key, value, minimum in (("runs", runs, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: must be an integer of at least {minimum} (got {value!r}). Correct it.",
            )
    if by not in get_args(journal.By):
        raise InputError(
            Code.CONFIG_INVALID,
            f"by: unknown sampler {by!r}. Choose one of {', '.join(get_args(journal.By))}.",
        )


def _check_phases(recipe: Recipe) -> None:
    """Checks the settings of all phases, which the recipe itself does not check."""
    from vfl_party.phases.course import Course

    for phase in Course(recipe.settings).phases:
        _ = phase.settings


def _check_metric(recipe: Recipe, name: str) -> None:
    task = recipe.settings.task
    if name not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"objective: a {task.kind} task has no metric {name!r}. Choose one of "
            f"{', '.join(task.all_metrics)}.",
        )


def _compute_digest(
    recipe: Recipe, data: Mapping[str, Any] | None, spaces: Mapping[str, Any], other: list[Any]
) -> str:
    """Returns a digest of the recipe, the rows and the arguments, which determine the trials."""
    tables, frames = add_data(recipe.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    if cells.find_unimportable_model(settings) is not None:
        inputs = settings.canonical_json()
    else:
        inputs = compute_inputs_digest(
            settings, divide(settings, recipe.base), None, Fingerprints(), frames
        )
    return sha256(json.dumps([inputs, spaces, other], default=str).encode()).hexdigest()


# The function that carries out an order, in a form that other processes can import.
ORDER_FUNCTION = "vfl_lab.searching.search:drive_order"


# The interval at which ended trials are reported and Ctrl-C is handled.
_TICK_S = 0.2


def run_in_processes(
    plan: TrialPlan,
    data: Mapping[str, Any] | None,
    jobs: int,
    backend: str | None,
    look: Callable[[], None],
) -> None:
    """Runs the trials of a search with ``jobs`` drivers in other processes.

    The arguments are those of ``drive`` and ``pool``. Raises VflError if a driver failed and the
    other drivers did not finish its trials.
    """
    simulate = plan.recipe.settings.simulate
    threads_each = simulate.threads if simulate is not None else 1
    errors: list[BaseException] = []
    with (
        _make_order(plan, data) as order,
        open_pool(ORDER_FUNCTION, jobs, threads_each, backend) as workers,
        open_waiting_threads(workers, jobs) as threads,
    ):
        pending = {threads.submit(workers.run, order) for _ in range(jobs)}
        while pending:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            errors += [error for future in done if (error := future.exception()) is not None]
            look()
    defects = [error for error in errors if not isinstance(error, VflError)]
    if defects or (errors and len(journal.get_ended_trials(plan.open_study())) < plan.trial_count):
        raise (defects or errors)[0]


@contextmanager
def _make_order(plan: TrialPlan, data: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Writes data frames to temporary files, and yields an order for the drivers. Raises
    InputError.
    """
    recipe = plan.recipe
    tables, frames = add_data(recipe.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    data_by_party = divide(settings, recipe.base)
    with tempfile.TemporaryDirectory(prefix="rows-", dir=plan.folder) as rows:
        run = Order(tables, settings, data_by_party, recipe.base, Path(rows), tables, None, frames)
        yield {
            "recipe": run.in_files("jobs=1"),
            "base": str(recipe.base),
            "spaces": write_spaces(plan.spaces),
            "folder": str(plan.folder),
            "plugins": get_import_paths("jobs=1"),
            "objective": plan.objective,
            "runs": plan.runs,
            "by": plan.by,
            "prune": plan.prune,
            "seed": plan.seed,
            "digest": plan.digest,
        }


def drive_order(order: dict[str, Any]) -> None:
    """Carries out an order: runs trials of a search in this process until all trials have ended."""
    with use_plugins(import_plugins(order["plugins"])), journal.silence_optuna():
        plan = TrialPlan(
            Recipe.from_dict(order["recipe"], order["base"]),
            parse_spaces(order["spaces"]),
            order["objective"],
            order["runs"],
            Path(order["folder"]),
            order["by"],
            order["prune"],
            order["seed"],
            order["digest"],
        )
        drive(plan, None)


Tell = Callable[[dict[str, Any]], None]


class SearchProgress:
    """Reports the progress of a search as events.

    Args:
        plan: The plan of the search.
        tell: A function that is called with an event at the beginning, and when a trial has ended.
        jobs: The number of trials that run at the same time.

    Raises InputError if the journal belongs to another search.
    """

    def __init__(self, plan: TrialPlan, tell: Tell, jobs: int) -> None:
        self._plan, self._tell, self._jobs = plan, tell, jobs
        with Claims(plan.folder) as claims, claims.lock_choice():
            self._study = plan.open_study()
        self._seen = {trial.number for trial in journal.get_ended_trials(self._study)}
        folder, runs = str(plan.folder), plan.trial_count
        tell({"event": "study", "folder": folder, "runs": runs, "left": self.left})

    @property
    def left(self) -> int:
        """The number of trials that had not ended at the last call of ``look``."""
        return max(0, self._plan.trial_count - len(self._seen))

    def look(self) -> None:
        """Reports the trials that have ended since the last call."""
        ended = journal.get_ended_trials(self._study)
        for trial in sorted(ended, key=_get_end_time_s):
            if trial.number not in self._seen:
                self._seen.add(trial.number)
                self._tell(self._make_event(trial, ended))

    def _make_event(self, trial: FrozenTrial, ended: list[FrozenTrial]) -> dict[str, Any]:
        converted = convert_trial(trial, self._plan.spaces)
        durations_s = [t.duration.total_seconds() for t in ended if t.duration is not None]
        duration_s = trial.duration.total_seconds() if trial.duration is not None else 0.0
        return {
            "event": converted.state,
            "number": len(self._seen),
            "of": self._plan.trial_count,
            "title": ", ".join(
                f"{key} = {format_value(value)}" for key, value in converted.values.items()
            ),
            "values": converted.values,
            "objective": self._plan.objective,
            "value": converted.value,
            "rounds": converted.rounds,
            "error": converted.error,
            "seconds": round(duration_s, 3),
            "left_s": fmean(durations_s) * self.left / self._jobs if durations_s else None,
        }


def _get_end_time_s(trial: FrozenTrial) -> float:
    return trial.datetime_complete.timestamp() if trial.datetime_complete is not None else 0.0


def format_value(value: Any) -> str:
    """Formats a value of a recipe's key as short text."""
    return f"{value:.4g}" if isinstance(value, float) else format_axis_value(value)


def sentence(event: dict[str, Any]) -> str:
    """Formats an event of a trial as a line of text."""
    formatters = {
        "finished": lambda: f"{event['objective']} {event['value']:.4g}",
        "pruned": lambda: f"pruned after {event['rounds']} rounds",
        "failed": lambda: f"failed: {event['error']}",
    }
    left = f"; about {format_duration(event['left_s'])} left" if event["left_s"] else ""
    return (
        f"run {event['number']} of {event['of']}: {event['title']}: "
        f"{formatters[event['event']]()}, {event['seconds']:.1f} s{left}"
    )


# The maximum number of finished trials in the table.
_MAX_TRIALS = 10


def show_search(path: Path, out: Path, *, jobs: int, backend: str | None, as_json: bool) -> None:
    """Runs a search, prints its progress, and then the best trials.

    ``as_json``: Whether to print events as JSON lines instead. Raises VflError.
    """
    plan = load_search(path, out)
    errors = Console(stderr=True)

    def print_event(event: dict[str, Any]) -> None:
        if as_json:
            click.echo(to_json(event, compact=True))
        else:
            text = study_sentence(event) if event["event"] == "study" else sentence(event)
            errors.print(text, markup=False, highlight=False, soft_wrap=True)

    result = run_search(plan, None, jobs=jobs, backend=backend, tell=print_event)
    if as_json:
        click.echo(to_json({"event": "best", **as_event(result)}, compact=True))
        return
    from vfl_party.models.metrics import lower_is_better

    lower = lower_is_better(plan.recipe.settings.task, plan.metric)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    console.print()
    console.print(_table(result, lower=lower))
    test_metrics = ", ".join(f"{name} {value:.4g}" for name, value in result.test.items())
    click.echo(f"\nthe best run is {result.run.folder}")
    click.echo(f"its test metrics, which were not used for the choice: {test_metrics or 'none'}\n")
    for name in ("trials.csv", "parallel.png", "importance.png"):
        if (result.folder / name).exists():
            click.echo(result.folder / name)


def as_event(result: Search) -> dict[str, Any]:
    """Returns the result of a search as a dict of JSON values."""
    return {
        "objective": result.objective,
        "value": result.value,
        "values": result.best,
        "run": str(result.run.folder),
        "test": result.test,
    }


def _table(result: Search, *, lower: bool) -> Table:
    """Returns a table of the best trials, best first."""
    trials = [trial for trial in result.trials if trial.value is not None]
    trials.sort(key=lambda trial: (trial.value or 0.0) * (1 if lower else -1))
    counts = [sum(t.state == state for t in result.trials) for state in ("pruned", "failed")]
    title = f"{count(len(trials), 'run')} finished, {counts[0]} pruned, {counts[1]} failed"
    table = Table(title=title, title_justify="left")
    for key in result.best:
        table.add_column(key, overflow="fold")
    table.add_column(result.objective, justify="right")
    for trial in trials[:_MAX_TRIALS]:
        cells = [format_value(value) for value in trial.values.values()]
        table.add_row(*cells, f"{trial.value:.4g}")
    return table


TABLE = "search"


class SearchTable(Section):
    """The table ``[search]``. Its keys are arguments of ``vfl.search``, which checks the values."""

    # The metric on the validation rows to optimize, such as "validation auc".
    objective: str
    # The number of trials, including pruned and failed trials.
    runs: int
    # {key of the recipe: list of values, or a table with from, to and log}
    spaces: dict[str, Any]
    # The sampler: tpe, random or grid.
    by: str = "tpe"
    prune: bool = True
    # The seed of the sampler. Every run uses the seed of the recipe.
    seed: int = 0


class SearchFile(Section):
    """A study file that contains a search."""

    name: Name
    # A recipe with [simulate], or the party files of all parties.
    recipe: str | tuple[str, ...] = Field(min_length=1)
    search: SearchTable


def is_search(path: Path) -> bool:
    """Returns whether a study file contains a search. Raises InputError if it cannot be read."""
    return TABLE in read_tables(path, "study")


def load_search(path: Path, out: Path) -> TrialPlan:
    """Reads a search from a study file, and plans its trials in a subfolder of ``out``. Raises
    InputError if the search or its recipe is invalid.
    """
    file = parse(SearchFile, read_tables(path, "study"), str(path))
    base, source = path.resolve().parent, file.recipe
    recipe = Recipe.of(base / source if isinstance(source, str) else [base / p for p in source])
    arguments = file.search.model_dump()
    spaces = dict(_flatten(arguments.pop("spaces")))
    try:
        return make_plan(recipe, spaces, None, out / file.name, **arguments)
    except InputError as error:
        raise InputError(error.code, ": ".join((str(path), TABLE, str(error)))) from None


def _flatten(spaces: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted key, space) pairs from nested tables, which TOML makes from dotted keys."""
    pairs = []
    for key, space in spaces.items():
        nested = isinstance(space, Mapping) and space and not KEYS & set(space)
        pairs += _flatten(space, f"{above}{key}.") if nested else [(f"{above}{key}", space)]
    return pairs
