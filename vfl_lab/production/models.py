"""Lists the trained runs in a folder with their stages, for ``vfl models``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vfl.summary.table import PIPE_WIDTH, new_table, wide_console
from vfl_common.registry import ModelRegistry, RecipeRuns, Stage
from vfl_common.summary import load_summary
from vfl_common.text import clean

# The maximum number of characters of a name that another party or person chose.
_MAX_CHARACTERS = 60
# The mark of a run with only one party, such as a baseline. It has the federation's recipe name.
_ALONE = " (one party)"
_MAIN_METRICS = ("accuracy", "auc", "rmse")


@dataclass(frozen=True)
class StagedRun:
    """A trained run with its stage.

    Args:
        run: The id of the run.
        recipe: The name of the recipe.
        stage: The stage of the run.
        since: The time of the last change of the stage; '' if it was never changed.
        who: The user who made the last change; '' if it was never changed.
        metrics: The metrics on the test rows; empty if the folder has no summary.
        alone: Whether the run had only one party, like a baseline.
    """

    run: str
    recipe: str
    stage: Stage
    since: str
    who: str
    metrics: dict[str, float]
    alone: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object that ``vfl models --json`` prints for the run."""
        return {
            "run": self.run,
            "recipe": self.recipe,
            "alone": self.alone,
            "stage": self.stage,
            "since": self.since,
            "who": self.who,
            "metrics": self.metrics,
        }


def models(out: Path) -> list[StagedRun]:
    """Returns the trained runs in ``out`` with their stages, newest first. Raises InputError."""
    registry = ModelRegistry(out)
    lines, changes = registry.lines(), {change.run: change for change in registry.changes()}
    runs = []
    for run in registry.list_trained():
        last = changes.get(run.run_id)
        runs.append(
            StagedRun(
                run.run_id,
                run.recipe,
                lines.get(run.recipe, RecipeRuns()).stage(run.run_id),
                last.at if last is not None else "",
                last.who if last is not None else "",
                _read_test_metrics(out / run.run_id),
                run.alone,
            )
        )
    return runs


def show_models(runs: list[StagedRun], console: Console | None = None) -> None:
    """Prints a table of the trained runs, with their metrics on the test rows."""
    table = new_table("Models, with metrics of the test rows")
    metric_names = [name for name in _MAIN_METRICS if any(name in run.metrics for run in runs)]
    for heading in ("run", "recipe", "stage", "since (UTC)", "by"):
        table.add_column(heading, no_wrap=True)
    for heading in metric_names:
        table.add_column(heading, no_wrap=True, justify="right")
    for run in runs:
        metrics = [f"{run.metrics[m]:.4g}" if m in run.metrics else "" for m in metric_names]
        since = run.since[:16].replace("T", " ")
        cells = [
            clean(text, _MAX_CHARACTERS)
            for text in (run.run, run.recipe, run.stage, since, run.who)
        ]
        cells[1] += _ALONE if run.alone else ""
        table.add_row(*cells, *metrics)
    console = console or wide_console()
    table_width = console.measure(table, options=console.options.update(max_width=400)).maximum
    console.width = max(console.width, PIPE_WIDTH, table_width)
    console.print(Group(table) if runs else Text("no trained runs"))


def _read_test_metrics(folder: Path) -> dict[str, float]:
    try:
        return dict(load_summary(folder / "summary.json").metrics.get("test", {}))
    except (OSError, ValueError, RecursionError):
        return {}
