"""Keeps models in production: their stages, the drift of their inputs, and the removal of old
runs.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vfl.simulation.federation import Origin
from vfl.summary.reading import ListedRun, find_runs
from vfl.summary.table import PIPE_WIDTH, new_table, wide_console
from vfl_common import scorings
from vfl_common.config.data import DataSettings
from vfl_common.config.party import load_party
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_error
from vfl_common.registry import ModelRegistry, RecipeRuns, Stage
from vfl_common.run_folder import LOCK, RunFolder
from vfl_common.summary import load_summary
from vfl_common.text import clean
from vfl_party.predict.input_drift import DRIFTED, MOVED, Shift, input_drift, score_drift
from vfl_party.predict.run import load_trained
from vfl_party.predict.trained import choose_run

_DAY_S = 86_400.0
# The states of runs that are never resumed.
_FINAL_STATES = ("finished", "set aside")
# {state: the reason to keep a run in this state}
_REASONS = {"failed": "it has failed", "stopped": "it was stopped"}


@dataclass(frozen=True)
class OldRun:
    """A run that is older than the limit.

    ``why`` is the reason to keep the run; '' if it may be removed.
    """

    folder: Path
    bytes: int
    why: str = ""


def find_old_runs(out: Path, days: float) -> list[OldRun]:
    """Returns the runs in ``out`` that began more than ``days`` ago, oldest first, each with the
    reason to keep it, if any. Raises InputError.
    """
    runs, _ = find_runs(out)
    limit_s = time.time() - days * _DAY_S
    old = [run for run in runs if run.began_s < limit_s and run.state != "study"]
    reasons = _find_needed(out, old, [run for run in runs if run not in old])
    return [
        OldRun(run.folder, _measure_bytes(run.folder), _get_reason(run, reasons))
        for run in sorted(old, key=lambda run: run.began_s)
    ]


def remove_run(old: OldRun) -> None:
    """Removes the folder of a run.

    Raises InputError if another process uses the folder, or if it cannot be removed.
    """
    folders = [RunFolder(path.parent, old.folder.name) for path in old.folder.glob(f"*/{LOCK}")]
    try:
        for folder in folders:
            folder.lock()
        shutil.rmtree(old.folder)
    except OSError as error:
        raise write_error(old.folder, error, "cannot be removed") from None
    finally:
        for folder in folders:
            folder.unlock()


def old_scorings(out: Path, days: float) -> list[scorings.Scoring]:
    """Returns the lines of the prediction log that are older than ``days``. Raises InputError."""
    return [scoring for scoring in scorings.read(out) if _is_older(scoring, days)]


def remove_scorings(out: Path, days: float) -> int:
    """Removes the lines of the prediction log that are older than ``days``, and returns their
    number. Raises InputError.
    """
    return scorings.remove(out, lambda scoring: _is_older(scoring, days))


def _is_older(scoring: scorings.Scoring, days: float) -> bool:
    try:
        written_s = datetime.fromisoformat(scoring.at).timestamp()
    except (ValueError, OverflowError, OSError):
        return False
    return written_s < time.time() - days * _DAY_S


def _find_needed(out: Path, old: list[ListedRun], others: list[ListedRun]) -> dict[str, str]:
    """Returns {run id: reason to keep the run}. ``others``: The runs newer than the limit."""
    needed = _find_needed_by_registry(out)
    kept_runs = [*others, *(run for run in old if _get_reason(run, needed))]
    # A kept run may need older runs, which are added to the list during the loop.
    for kept_run in kept_runs:
        for run, use in _find_uses(kept_run.folder):
            if run not in needed:
                needed[run] = f"{kept_run.folder.name} {use}"
                kept_runs.extend(other for other in old if other.folder.name == run)
    return needed


def _find_needed_by_registry(out: Path) -> dict[str, str]:
    """Returns {run id: reason to keep the run} for the runs that the model registry needs."""
    registry, newest = ModelRegistry(out), dict[str, str]()
    for trained in registry.list_trained():
        newest.setdefault(trained.recipe, trained.run_id)
    needed = dict.fromkeys(newest.values(), "it is the newest trained run of its recipe")
    for line in registry.lines().values():
        if line.before:
            needed[line.before[-1]] = "a rollback restores it"
        if line.current:
            needed[line.current] = "it is in production"
    return needed


def _find_uses(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields (run id, use) for each earlier run that the recipe of a run depends on."""
    for path in folder.glob("*/run.json"):
        try:
            recipe: Recipe = RunFolder(path.parent, folder.name).recipe()
        except InputError:
            continue
        if recipe.rows.alignment is not None:
            yield recipe.rows.alignment, "uses its alignment"
        if recipe.start is not None:
            yield recipe.start.run, "has started from it"


def _get_reason(run: ListedRun, needed: dict[str, str]) -> str:
    # A failed prediction is never resumed.
    if run.state not in _FINAL_STATES and (run.job, run.state) != ("predict", "failed"):
        return _REASONS.get(run.state, f"it is {run.state}")
    return needed.get(run.folder.name, "")


def _measure_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


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


def compute_drift(
    run: Path,
    data: str | None,
    query: str | None,
    party: str | None,
    read_as: Path | None,
    scores: Path | None,
) -> list[Shift]:
    """Computes the shift of each column, then of each score. The arguments are those of ``vfl
    drift``.

    Raises InputError.
    """
    if data is None and read_as is None and scores is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "drift: needs new rows or scores. Give --data, --read-as or --scores.",
        )
    settings: DataSettings | None = None
    if read_as is not None:
        party_file = load_party(read_as)
        settings, party = party_file.data, party or party_file.name
    folder, name = choose_run(run, party)
    trained = load_trained(folder, name)
    if settings is None:
        # The file exists only if all parties of the run were on this machine.
        with contextlib.suppress(InputError):
            settings = Origin.of(folder).parts().get(name)
    shifts: list[Shift] = []
    if data is not None or read_as is not None:
        if trained.state["preprocessor"] is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder}: {name} has no columns but the label. Give --scores, or another "
                "--party.",
            )
        if settings is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder}: lacks the settings to read rows of {name}. Give the party file with "
                "--read-as.",
            )
        shifts += input_drift(trained, settings, data, query)
    if scores is not None:
        shifts += score_drift(trained, scores)
    return shifts


def show_drift(shifts: Sequence[Shift]) -> None:
    """Prints the stability index of each column, and the numbers of drifted and moved columns."""
    table = new_table("Population stability index of each column")
    table.add_column("column", no_wrap=True)
    table.add_column("PSI index", justify="right")
    table.add_column("by chance up to", justify="right")
    table.add_column("verdict")
    for shift in shifts:
        numbers = (f"{shift.index:.3f}", f"{shift.chance:.3f}")
        table.add_row(clean(shift.name, _MAX_CHARACTERS), *numbers, shift.verdict)
    counts = {word: sum(shift.verdict == word for shift in shifts) for word in ("drifted", "moved")}
    summary = f"columns: {len(shifts)}; drifted: {counts['drifted']}; moved: {counts['moved']}"
    limits = f"moved: from {MOVED:g}; drifted: from {DRIFTED:g}; both only beyond chance"
    wide_console().print(Group(table, Text(""), Text(summary), Text(limits, "dim")))
