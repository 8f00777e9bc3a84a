"""Prints the progress and the result of a search, as text or as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from vfl_common.text import count, to_json
from vfl_lab.searching.file import load_search
from vfl_lab.searching.found import Search
from vfl_lab.searching.progress import format_value, sentence
from vfl_lab.searching.search import run_search
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
