"""``vfl models``: lists the trained runs of a folder with their stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vfl.report.table import PIPE_WIDTH, new_table, wide_console
from vfl_common.production.registry import ModelRegistry, RecipeRuns, Stage
from vfl_common.summary import load_summary
from vfl_common.text import clean

# Length limit of a name that somebody else chose.
_MAX_CHARACTERS = 60
# Marks a run of one party, such as a baseline, which has the name of its federation's recipe.
_ALONE = " (one party)"
_MAIN = ("accuracy", "auc", "rmse")


@dataclass(frozen=True)
class StagedRun:
    """A trained run.

    ``since``, ``who``: time and user of the last change of its stage; '' without one. ``metrics``:
    those of the test rows; empty without a summary. ``alone``: whether the run had one party only,
    such as a baseline.
    """

    run: str
    recipe: str
    stage: Stage
    since: str
    who: str
    metrics: dict[str, float]
    alone: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns what ``vfl models --json`` prints."""
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
    """Returns the trained runs in ``out``, the newest first. Raises InputError."""
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
    """Prints the models as a table, with the metrics of the test rows."""
    table = new_table("Models, with metrics of the test rows")
    metric_names = [name for name in _MAIN if any(name in run.metrics for run in runs)]
    for heading in ("run", "recipe", "stage", "since (UTC)", "by"):
        table.add_column(heading, no_wrap=True)
    for heading in metric_names:
        table.add_column(heading, no_wrap=True, justify="right")
    for run in runs:
        metrics = [f"{run.metrics[m]:.4g}" if m in run.metrics else "" for m in metric_names]
        since = run.since[:16].replace("T", " ")
        words = [
            clean(w, _MAX_CHARACTERS) for w in (run.run, run.recipe, run.stage, since, run.who)
        ]
        words[1] += _ALONE if run.alone else ""
        table.add_row(*words, *metrics)
    console = console or wide_console()
    whole = console.measure(table, options=console.options.update(max_width=400)).maximum
    console.width = max(console.width, PIPE_WIDTH, whole)
    console.print(Group(table) if runs else Text("no trained runs"))


def _read_test_metrics(folder: Path) -> dict[str, float]:
    try:
        return dict(load_summary(folder / "summary.json").metrics.get("test", {}))
    except (OSError, ValueError, RecursionError):
        return {}
