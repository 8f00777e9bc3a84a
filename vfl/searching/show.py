"""Shows a search of ``vfl study`` to a person, or as JSON lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from vfl.searching.file import load_search
from vfl.searching.found import Search
from vfl.searching.progress import sentence, short
from vfl.searching.search import run_search
from vfl.studies.show import PIPE_WIDTH
from vfl.studies.show import sentence as of_study
from vfl_common.text import count, to_json
from vfl_party.models.metrics import lower_is_better

# The number of finished trials in the table.
_MAX_TRIALS = 10


def show_search(path: Path, out: Path, *, jobs: int, backend: str | None, as_json: bool) -> None:
    """Runs the command: shows progress, then the best trials.

    ``as_json``: whether to print events as JSON lines instead. Raises VflError.
    """
    plan = load_search(path, out)
    errors = Console(stderr=True)

    def say(event: dict[str, Any]) -> None:
        if as_json:
            click.echo(to_json(event, compact=True))
        else:
            text = of_study(event) if event["event"] == "study" else sentence(event)
            errors.print(text, markup=False, highlight=False, soft_wrap=True)

    made = run_search(plan, None, jobs=jobs, backend=backend, tell=say)
    if as_json:
        click.echo(to_json({"event": "best", **as_event(made)}, compact=True))
        return
    lower = lower_is_better(plan.recipe.settings.task, plan.metric)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    console.print()
    console.print(_table(made, lower=lower))
    tested = ", ".join(f"{name} {value:.4g}" for name, value in made.test.items())
    click.echo(f"\nthe best run is {made.run.folder}")
    click.echo(f"its test metrics, which had no part in the choice: {tested or 'none'}\n")
    for name in ("trials.csv", "parallel.png", "importance.png"):
        if (made.folder / name).exists():
            click.echo(made.folder / name)


def as_event(made: Search) -> dict[str, Any]:
    """Returns the result as JSON values."""
    return {
        "objective": made.objective,
        "value": made.value,
        "values": made.best,
        "run": str(made.run.folder),
        "test": made.test,
    }


def _table(made: Search, *, lower: bool) -> Table:
    """Returns the best trials, the best one first."""
    trials = [trial for trial in made.trials if trial.value is not None]
    trials.sort(key=lambda trial: (trial.value or 0.0) * (1 if lower else -1))
    counts = [sum(t.state == state for t in made.trials) for state in ("pruned", "failed")]
    title = f"{count(len(trials), 'run')} finished, {counts[0]} pruned, {counts[1]} failed"
    table = Table(title=title, title_justify="left")
    for key in made.best:
        table.add_column(key, overflow="fold")
    table.add_column(made.objective, justify="right")
    for trial in trials[:_MAX_TRIALS]:
        cells = [short(value) for value in trial.values.values()]
        table.add_row(*cells, f"{trial.value:.4g}")
    return table
