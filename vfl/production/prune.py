"""``vfl prune``: removes old runs that nothing needs, and old lines of the log of predictions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vfl.report.runs import ListedRun, find_runs
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.files import write_error
from vfl_common.production import scorings
from vfl_common.production.registry import ModelRegistry
from vfl_common.run_folder import LOCK, RunFolder

_DAY_S = 86_400.0
# States of runs that nobody resumes.
_OVER = ("finished", "set aside")
_STAYS = {"failed": "it has failed", "stopped": "it was stopped"}


@dataclass(frozen=True)
class OldRun:
    """A run that is older than the limit. ``why``: why it is kept; '' if it may be removed."""

    folder: Path
    bytes: int
    why: str = ""


def old_runs(out: Path, days: float) -> list[OldRun]:
    """Returns the runs in ``out`` that began more than ``days`` ago, the oldest first, with the
    reason of those that are kept. Raises InputError.
    """
    runs, _ = find_runs(out)
    before = time.time() - days * _DAY_S
    old = [run for run in runs if run.began_s < before and run.state != "study"]
    reasons = _find_needed(out, old, [run for run in runs if run not in old])
    return [
        OldRun(run.folder, _size(run.folder), _why(run, reasons))
        for run in sorted(old, key=lambda run: run.began_s)
    ]


def remove_run(old: OldRun) -> None:
    """Removes the folder of a run.

    Raises InputError if another process uses it, or if it cannot be removed.
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
    """Returns the lines of the prediction log older than ``days``. Raises InputError."""
    return [scoring for scoring in scorings.read(out) if _older(scoring, days)]


def remove_scorings(out: Path, days: float) -> int:
    """Removes the lines older than ``days`` and returns their number. Raises InputError."""
    return scorings.remove(out, lambda scoring: _older(scoring, days))


def _older(scoring: scorings.Scoring, days: float) -> bool:
    try:
        at = datetime.fromisoformat(scoring.at).timestamp()
    except (ValueError, OverflowError, OSError):
        return False
    return at < time.time() - days * _DAY_S


def _find_needed(out: Path, old: list[ListedRun], others: list[ListedRun]) -> dict[str, str]:
    """Returns {run id: why it must be kept}. ``others``: newer runs, which are kept."""
    needed = _in_production(out)
    staying = [*others, *(run for run in old if _why(run, needed))]
    # A run that another one needs may need more runs: the list grows.
    for staying_run in staying:
        for run, use in _uses(staying_run.folder):
            if run not in needed:
                needed[run] = f"{staying_run.folder.name} {use}"
                staying.extend(other for other in old if other.folder.name == run)
    return needed


def _in_production(out: Path) -> dict[str, str]:
    """Returns {run id: why it must be kept} by the model registry."""
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


def _uses(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields each run that the recipe of a run names, and what it takes from that run."""
    for path in folder.glob("*/run.json"):
        try:
            recipe: Recipe = RunFolder(path.parent, folder.name).recipe()
        except InputError:
            continue
        if recipe.rows.alignment is not None:
            yield recipe.rows.alignment, "uses its alignment"
        if recipe.start is not None:
            yield recipe.start.run, "has started from it"


def _why(run: ListedRun, needed: dict[str, str]) -> str:
    # A failed prediction is never resumed.
    if run.state not in _OVER and (run.job, run.state) != ("predict", "failed"):
        return _STAYS.get(run.state, f"it is {run.state}")
    return needed.get(run.folder.name, "")


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
