"""``vfl prune``: removes old runs, and old lines of the log of predictions, that nothing needs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vfl.report.runs import Listed, find_runs
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.files import unwritable
from vfl_common.production import scorings
from vfl_common.production.registry import ModelRegistry
from vfl_common.run_folder import LOCK, RunFolder

_DAY_S = 86_400.0
# Of an unfinished run nobody knows whether somebody resumes it.
_OVER = ("finished", "set aside")
_STAYS = {"failed": "it has failed", "stopped": "it was stopped"}


@dataclass(frozen=True)
class Old:
    """A run that is older than asked. ``why``: why it is kept; '' if it may go."""

    folder: Path
    bytes: int
    why: str = ""


def old_runs(out: Path, days: float) -> list[Old]:
    """Returns the runs in ``out`` that began more than ``days`` ago, the oldest first, each with
    why it stays, if it does. Raises InputError.
    """
    found, _ = find_runs(out)
    before = time.time() - days * _DAY_S
    old = [each for each in found if each.began_s < before and each.state != "study"]
    kept = _needed(out, old, [each for each in found if each not in old])
    return [
        Old(each.folder, _size(each.folder), _why(each, kept))
        for each in sorted(old, key=lambda each: each.began_s)
    ]


def remove_run(old: Old) -> None:
    """Removes the folder of a run. Raises InputError if another process has it, or if it cannot be
    removed.
    """
    held = [RunFolder(path.parent, old.folder.name) for path in old.folder.glob(f"*/{LOCK}")]
    try:
        for each in held:
            each.lock()
        shutil.rmtree(old.folder)
    except OSError as error:
        raise unwritable(old.folder, error, "cannot be removed") from None
    finally:
        for each in held:
            each.unlock()


def old_scorings(out: Path, days: float) -> list[scorings.Scoring]:
    """Returns the lines of the log of predictions that are older. Raises InputError."""
    return [each for each in scorings.read(out) if _older(each, days)]


def remove_scorings(out: Path, days: float) -> int:
    """Removes those lines, and returns how many. Raises InputError."""
    return scorings.remove(out, lambda each: _older(each, days))


def _older(each: scorings.Scoring, days: float) -> bool:
    try:
        at = datetime.fromisoformat(each.at).timestamp()
    except (ValueError, OverflowError, OSError):
        return False
    return at < time.time() - days * _DAY_S


def _needed(out: Path, old: list[Listed], others: list[Listed]) -> dict[str, str]:
    """Returns {run's id: why it must stay}. ``others``: the runs that stay for their age."""
    needed = _in_production(out)
    staying = [*others, *(each for each in old if _why(each, needed))]
    # A run that stays for another one's sake names runs, too: the list grows.
    for each in staying:
        for run, use in _uses(each.folder):
            if run not in needed:
                needed[run] = f"{each.folder.name} {use}"
                staying.extend(other for other in old if other.folder.name == run)
    return needed


def _in_production(out: Path) -> dict[str, str]:
    """Returns {run's id: why it must stay}, as the registry of models has it."""
    registry, newest = ModelRegistry(out), dict[str, str]()
    for trained in registry.trained():
        newest.setdefault(trained.recipe, trained.run_id)
    needed = dict.fromkeys(newest.values(), "it is the newest trained run of its recipe")
    for line in registry.lines().values():
        if line.before:
            needed[line.before[-1]] = "a rollback would bring it back"
        if line.current:
            needed[line.current] = "it is in production"
    return needed


def _uses(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields each run that the recipe of a run names, with what it takes from that run."""
    for path in folder.glob("*/run.json"):
        try:
            recipe: Recipe = RunFolder(path.parent, folder.name).recipe()
        except InputError:
            continue
        if recipe.rows.alignment is not None:
            yield recipe.rows.alignment, "has its alignment"
        if recipe.start is not None:
            yield recipe.start.run, "has started from it"


def _why(each: Listed, needed: dict[str, str]) -> str:
    # A prediction that has failed is never resumed.
    if each.state not in _OVER and (each.job, each.state) != ("predict", "failed"):
        return _STAYS.get(each.state, f"it is {each.state}")
    return needed.get(each.folder.name, "")


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
