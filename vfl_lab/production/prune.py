"""Removes old runs that are not needed, and old lines of the prediction log, for ``vfl prune``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vfl.summary.reading import ListedRun, find_runs
from vfl_common import scorings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.files import write_error
from vfl_common.registry import ModelRegistry
from vfl_common.run_folder import LOCK, RunFolder

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
