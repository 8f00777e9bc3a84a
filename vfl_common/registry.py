"""The model registry: ``models.json`` in a party's folder of runs records which run is in
production.

The file lists all changes, the oldest first. A trained run is a candidate until it is promoted. At
most one run of each recipe name is in production; a promotion retires the previous run. Each party
keeps its own file. Run ids are the same at all parties, so the server of a joint prediction notices
if two parties have different runs in production.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import PLAIN_NAME, lock_folder, write_atomic
from vfl_common.process.logs import utc
from vfl_common.run_folder import RunFolder
from vfl_common.text import clean, list_names

FILE = "models.json"
LATEST, PRODUCTION = "latest", "production"
# The words that a person may write instead of a run id.
WORDS = (LATEST, PRODUCTION)
Stage = Literal["candidate", "production", "retired"]
Act = Literal["promote", "rollback", "retire"]


@dataclass(frozen=True)
class Change:
    """One change of a stage. ``run``: the run that was promoted, retired or restored by a
    rollback.
    """

    act: Act
    run: str
    recipe: str
    at: str
    who: str


@dataclass
class RecipeRuns:
    """The stages of the runs with one recipe name. ``before``: earlier runs in production, the
    newest last.
    """

    current: str | None = None
    before: list[str] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    def apply(self, change: Change) -> None:
        """Updates the stages with one change."""
        run = change.run
        if self.current is not None and change.act != "retire":
            self.retired.add(self.current)
        if change.act == "promote":
            if self.current is not None:
                self.before.append(self.current)
            self._take(run)
        elif change.act == "rollback":
            self._take(run)
        else:
            self.retired.add(run)
            self.before = [earlier for earlier in self.before if earlier != run]
            self.current = None if run == self.current else self.current

    def _take(self, run: str) -> None:
        self.current = run
        self.before = [earlier for earlier in self.before if earlier != run]
        self.retired.discard(run)

    def stage(self, run: str) -> Stage:
        """Returns the stage of a trained run of this recipe name."""
        if run == self.current:
            return "production"
        return "retired" if run in self.retired else "candidate"


@dataclass(frozen=True)
class RegisteredRun:
    """A run that was trained to its end, read from a party's folder.

    ``recipe``: the name of the recipe. ``began``: see ``when_began``. ``alone``: whether the run
    had only one party, such as a baseline.
    """

    run_id: str
    recipe: str
    began: tuple[float, float, str]
    alone: bool = False


class ModelRegistry:
    """The registry in one folder of runs. ``party``: the party whose runs are listed; '' for all
    parties.
    """

    def __init__(self, out: Path, party: str = "") -> None:
        self.out, self._party = out, party

    def changes(self) -> list[Change]:
        """Returns all changes, the oldest first. Raises InputError if the file is damaged."""
        path = self.out / FILE
        try:
            return _parse_changes(json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be read ({error.strerror}). Check its permissions.",
            ) from None
        except (ValueError, TypeError, RecursionError):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: is damaged. Restore it, or remove it and promote a run again.",
            ) from None

    def lines(self) -> dict[str, RecipeRuns]:
        """Returns {recipe name: the stages of its runs}. Raises InputError if the file is
        damaged.
        """
        lines: dict[str, RecipeRuns] = {}
        for change in self.changes():
            lines.setdefault(change.recipe, RecipeRuns()).apply(change)
        return lines

    def list_trained(self) -> list[RegisteredRun]:
        """Returns the runs in the folder that were trained to their end, the newest first."""
        paths = self.out.glob(f"*/{self._party or '*'}/run.json")
        runs_by_id: dict[str, RegisteredRun] = {}
        for run in filter(None, map(_read_trained, sorted(paths))):
            runs_by_id[run.run_id] = min(
                run, runs_by_id.get(run.run_id, run), key=lambda registered: registered.began
            )
        return sorted(runs_by_id.values(), key=lambda run: run.began, reverse=True)

    def find(self, word: str, recipe: str = "") -> str:
        """Returns the id of the run that the word ``latest`` or ``production`` means.

        A run of one party, such as a baseline, is the latest run only if there is no other run.

        Args:
            word: One of ``WORDS``.
            recipe: The recipe name; '' if all runs have the same one.

        Raises InputError if there is no such run, or if several recipes have such a run.
        """
        runs = self.list_trained()
        if word == LATEST:
            by_preference = sorted(runs, key=lambda run: (not run.alone, run.began))
            run_ids = {run.recipe: run.run_id for run in by_preference}
        else:
            run_ids = {
                name: stages.current for name, stages in self.lines().items() if stages.current
            }
        if not recipe and len(run_ids) > 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{self.out}: {word}: several recipes have such a run "
                f"({list_names(sorted(run_ids))}). Give the folder of the run.",
            )
        run_id = run_ids.get(recipe) if recipe else next(iter(run_ids.values()), None)
        if run_id is None:
            where = f"{self.out}: recipe {recipe}" if recipe else f"{self.out}"
            raise InputError(
                Code.FILE_INVALID,
                f"{where}: has no trained run. Train one first."
                if word == LATEST
                else f"{where}: has no run in production. Promote one: vfl models promote RUN.",
            )
        if all(run.run_id != run_id for run in runs):
            raise InputError(
                Code.FILE_INVALID,
                f"{self.out}: run {run_id} is in production, but its folder does not contain a "
                "trained run. Restore it, or roll back with `vfl models rollback`.",
            )
        return run_id

    def folder(self, name: str, recipe: str = "") -> Path:
        """Returns the folder of a run. Raises InputError.

        ``name``: a path, the id of a run in this folder of runs, or one of ``WORDS`` (see
        ``find``).
        """
        if name in WORDS:
            return self.out / self.find(name, recipe)
        by_id = self.out / name
        is_run_id = PLAIN_NAME.fullmatch(name) is not None and by_id.is_dir()
        return by_id if is_run_id and not Path(name).exists() else Path(name)

    def stage(self, run_id: str) -> Stage:
        """Returns the stage of a trained run. Raises InputError if no run in the folder has this
        id.
        """
        return self.lines().get(self._recipe_of(run_id), RecipeRuns()).stage(run_id)

    def promote(self, run_id: str) -> str | None:
        """Puts a trained run into production. Returns the run that was in production before, or
        None. Raises InputError.

        Nothing changes if the run is in production already.
        """
        recipe = self._recipe_of(run_id)
        with self._edit_changes() as changes:
            before = self.lines().get(recipe, RecipeRuns()).current
            if before != run_id:
                changes.append(_make_change("promote", run_id, recipe))
        return before

    def retire(self, run_id: str) -> Stage:
        """Retires a run and returns its previous stage. Raises InputError."""
        recipe = self._recipe_of(run_id)
        with self._edit_changes() as changes:
            before = self.stage(run_id)
            if before != "retired":
                changes.append(_make_change("retire", run_id, recipe))
        return before

    def rollback(self, recipe: str = "") -> tuple[str, str | None]:
        """Puts the previous run back into production.

        ``recipe``: the recipe name; needed if several recipes have runs in production. Returns the
        restored run and the retired run. Raises InputError if there is no earlier run.
        """
        with self._edit_changes() as changes:
            stages_by_recipe = {
                name: stages
                for name, stages in self.lines().items()
                if stages.current or stages.before
            }
            if not recipe and len(stages_by_recipe) > 1:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self.out}: has models of several recipes "
                    f"({list_names(sorted(stages_by_recipe))}). Choose one with --recipe.",
                )
            name = recipe or next(iter(stages_by_recipe), "")
            runs, trained_ids = (
                stages_by_recipe.get(name, RecipeRuns()),
                {run.run_id for run in self.list_trained()},
            )
            restored = next(
                (run_id for run_id in reversed(runs.before) if run_id in trained_ids), None
            )
            if restored is None:
                raise InputError(
                    Code.FILE_INVALID,
                    f"{self.out}: no earlier run{f' of recipe {name}' if name else ''} was in "
                    "production. Promote another run.",
                )
            changes.append(_make_change("rollback", restored, name))
        return restored, runs.current

    def _recipe_of(self, run_id: str) -> str:
        run = next(
            (candidate for candidate in self.list_trained() if candidate.run_id == run_id), None
        )
        if run is None:
            raise InputError(
                Code.FILE_INVALID,
                f"{self.out / run_id}: was not trained to its end here. Choose a run from `vfl "
                "models`.",
            )
        return run.recipe

    @contextlib.contextmanager
    def _edit_changes(self) -> Iterator[list[Change]]:
        """Locks the file and yields the list of changes. At the end of the block, changes that the
        block has appended are written.
        """
        with lock_folder(self.out):
            changes = self.changes()
            num_changes = len(changes)
            yield changes
            if len(changes) > num_changes:
                text = json.dumps([asdict(change) for change in changes], indent=1) + "\n"
                write_atomic(self.out / FILE, text, durable=True)


def make_sort_key(run_id: str, written_s: float) -> tuple[float, float, str]:
    """Returns the sort key of a run: the time in its id, or else ``written_s``, the time at which
    its copy of the recipe was written (which copying the folder changes). Runs with the same time
    are sorted by ``written_s``, then by id.
    """
    time_in_id = parse_time(run_id)
    return (written_s if time_in_id is None else time_in_id, written_s, run_id)


def parse_time(run_id: str) -> float | None:
    """Returns the time in a run's id, in seconds since 1970; None if a person has chosen the id."""
    try:
        return datetime.strptime(run_id[:15] + "+0000", "%Y%m%d-%H%M%S%z").timestamp()
    except ValueError:
        return None


def get_user_name() -> str:
    """Returns the name of the user who runs this program, or the numeric user id if the user has no
    name.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _make_change(act: Act, run: str, recipe: str) -> Change:
    return Change(act, run, recipe, utc(time.time()), get_user_name())


def _parse_changes(content: object) -> list[Change]:
    """Parses changes. Raises ValueError or TypeError if they are invalid."""
    if not isinstance(content, list):
        raise TypeError("the content must be a list of changes")
    changes = [Change(**item) for item in content]
    for change in changes:
        is_text = all(isinstance(value, str) for value in asdict(change).values())
        if not is_text or change.act not in get_args(Act) or not PLAIN_NAME.fullmatch(change.run):
            raise ValueError(
                f"a change has an unknown act, or a field that is not text (got {change})"
            )
    return changes


def _read_trained(path: Path) -> RegisteredRun | None:
    """Reads ``run.json`` of a process. Returns None if its training has not finished, or if the
    file is damaged.
    """
    folder = RunFolder(path.parent, path.parents[1].name)
    try:
        facts: dict[str, Any] = folder.facts()
        if facts.get("job") != "train" or not facts.get("trained"):
            return None
        recipe = folder.recipe()
    except VflError:
        return None
    run_id = folder.run_id
    if not PLAIN_NAME.fullmatch(run_id):
        return None
    written_s = path.with_name("recipe.json").stat().st_mtime
    alone = len(recipe.parties) == 1
    return RegisteredRun(run_id, clean(recipe.name), make_sort_key(run_id, written_s), alone)
