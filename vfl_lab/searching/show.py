"""Reads the file of a search, and prints its progress and result, as text or as JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import Field
from rich.console import Console
from rich.table import Table

from vfl.library.recipe import Recipe
from vfl_common.config.base import Section, parse, read_tables
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import InputError
from vfl_common.text import count, to_json
from vfl_lab.searching.found import Search
from vfl_lab.searching.progress import format_value, sentence
from vfl_lab.searching.search import make_plan, run_search
from vfl_lab.searching.spaces import KEYS
from vfl_lab.searching.trying import TrialPlan
from vfl_lab.studies.show import PIPE_WIDTH
from vfl_lab.studies.show import format_event as study_sentence
from vfl_party.models.metrics import lower_is_better

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
