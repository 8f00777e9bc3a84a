"""``vfl models``: the trained runs of a folder, with their stages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vfl.report.table import PIPE_WIDTH, new_table, wide_console
from vfl_common.production.registry import Line, ModelRegistry, Stage
from vfl_common.summary import load_summary
from vfl_common.text import clean

# Characters of a name that somebody else chose.
_MOST = 60
# Of a baseline, say, which is trained under the name of its federation's recipe.
_ALONE = " (one party)"
_MAIN = ("accuracy", "auc", "rmse")


@dataclass(frozen=True)
class StagedRun:
    """A trained run. ``since``, ``who``: of its last change; '' if it never changed. ``metrics``:
    of the test rows, where the run's summary is here. ``alone``: whether it had one party only, as
    a baseline has.
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
        found: dict[str, Any] = {"run": self.run, "recipe": self.recipe, "alone": self.alone}
        found |= {"stage": self.stage, "since": self.since, "who": self.who}
        return found | {"metrics": self.metrics}


def models(out: Path) -> list[StagedRun]:
    """Returns the trained runs in ``out``, the newest first. Raises InputError."""
    registry = ModelRegistry(out)
    lines, changes = registry.lines(), {each.run: each for each in registry.changes()}
    found = []
    for each in registry.trained():
        last = changes.get(each.run_id)
        found.append(
            StagedRun(
                each.run_id,
                each.recipe,
                lines.get(each.recipe, Line()).stage(each.run_id),
                last.at if last is not None else "",
                last.who if last is not None else "",
                _tested(out / each.run_id),
                each.alone,
            )
        )
    return found


def show_models(found: list[StagedRun], console: Console | None = None) -> None:
    """Prints the models as a table, with the metrics of the test rows."""
    table = new_table("Models, with metrics of the test rows")
    shown = [name for name in _MAIN if any(name in each.metrics for each in found)]
    for heading in ("run", "recipe", "stage", "since (UTC)", "by"):
        table.add_column(heading, no_wrap=True)
    for heading in shown:
        table.add_column(heading, no_wrap=True, justify="right")
    for each in found:
        metrics = [f"{each.metrics[m]:.4g}" if m in each.metrics else "" for m in shown]
        since = each.since[:16].replace("T", " ")
        words = [clean(w, _MOST) for w in (each.run, each.recipe, each.stage, since, each.who)]
        words[1] += _ALONE if each.alone else ""
        table.add_row(*words, *metrics)
    console = console or wide_console()
    whole = console.measure(table, options=console.options.update(max_width=400)).maximum
    console.width = max(console.width, PIPE_WIDTH, whole)
    console.print(Group(table) if found else Text("no trained runs"))


def _tested(folder: Path) -> dict[str, float]:
    try:
        return dict(load_summary(folder / "summary.json").metrics.get("test", {}))
    except (OSError, ValueError, RecursionError):
        return {}
