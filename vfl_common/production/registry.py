"""The model registry: ``models.json`` in a party's folder of runs says which run is in production.

The file lists all changes, the oldest first. A trained run is a candidate until it is promoted. One
run of each recipe name is in production: a promotion retires the run before it. Each party keeps
its own file; run ids are the same at all parties, so the server of a joint prediction notices if
two parties have different runs in production.
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
# Words that a person may write in place of a run id.
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
    """The runs of one recipe name. ``before``: those that were in production, the newest last."""

    current: str | None = None
    before: list[str] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    def apply(self, change: Change) -> None:
        """Applies one change."""
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
    """A run that was trained to its end, by the folder of a party.

    ``recipe``: the name of the recipe; ``began``: see ``when_began``; ``alone``: whether the run
    had one party only, such as a baseline.
    """

    run_id: str
    recipe: str
    began: tuple[float, float, str]
    alone: bool = False


class ModelRegistry:
    """The registry of one folder of runs. ``party``: count only this party's runs; '': all."""

    def __init__(self, out: Path, party: str = "") -> None:
        self.out, self._party = out, party

    def changes(self) -> list[Change]:
        """Returns all changes, the oldest first. Raises InputError if the file is damaged."""
        path = self.out / FILE
        try:
            return _changes(json.loads(path.read_text(encoding="utf-8")))
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
        """Returns {recipe name: the stages of its runs}. Raises InputError."""
        lines: dict[str, RecipeRuns] = {}
        for change in self.changes():
            lines.setdefault(change.recipe, RecipeRuns()).apply(change)
        return lines

    def list_trained(self) -> list[RegisteredRun]:
        """Returns the runs in the folder that were trained to their end, the newest first."""
        paths = self.out.glob(f"*/{self._party or '*'}/run.json")
        known: dict[str, RegisteredRun] = {}
        for run in filter(None, map(_read_trained, sorted(paths))):
            known[run.run_id] = min(run, known.get(run.run_id, run), key=lambda one: one.began)
        return sorted(known.values(), key=lambda run: run.began, reverse=True)

    def find(self, word: str, recipe: str = "") -> str:
        """Returns the id of the run that ``latest`` or ``production`` means.

        A run of one party, such as a baseline, is the latest only if there is no other.

        Args:
            word: one of ``WORDS``.
            recipe: the recipe name; '': that of the only runs here.

        Raises InputError if there is no such run, or if several recipes have one.
        """
        runs = self.list_trained()
        if word == LATEST:
            best_last = sorted(runs, key=lambda run: (not run.alone, run.began))
            known = {run.recipe: run.run_id for run in best_last}
        else:
            known = {name: of.current for name, of in self.lines().items() if of.current}
        if not recipe and len(known) > 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{self.out}: {word}: several recipes have such a run "
                f"({list_names(sorted(known))}). Give the folder of the run.",
            )
        run_id = known.get(recipe) if recipe else next(iter(known.values()), None)
        if run_id is None:
            where = f"{self.out}: recipe {recipe}" if recipe else f"{self.out}"
            raise InputError(
                Code.FILE_INVALID,
                f"{where}: has no trained run here. Train one first."
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

        ``name``: a path, the id of a run in this folder of runs, or one of ``WORDS``, see ``find``.
        """
        if name in WORDS:
            return self.out / self.find(name, recipe)
        by_id = self.out / name
        known = PLAIN_NAME.fullmatch(name) is not None and by_id.is_dir()
        return by_id if known and not Path(name).exists() else Path(name)

    def stage(self, run_id: str) -> Stage:
        """Returns the stage of a trained run. Raises InputError if none here has this id."""
        return self.lines().get(self._recipe_of(run_id), RecipeRuns()).stage(run_id)

    def promote(self, run_id: str) -> str | None:
        """Puts a trained run into production; returns the run that was before. Raises InputError.

        Nothing changes if it is in production already.
        """
        recipe = self._recipe_of(run_id)
        with self._changing() as changes:
            before = self.lines().get(recipe, RecipeRuns()).current
            if before != run_id:
                changes.append(_change("promote", run_id, recipe))
        return before

    def retire(self, run_id: str) -> Stage:
        """Retires a run; returns the stage that it had. Raises InputError."""
        recipe = self._recipe_of(run_id)
        with self._changing() as changes:
            before = self.stage(run_id)
            if before != "retired":
                changes.append(_change("retire", run_id, recipe))
        return before

    def rollback(self, recipe: str = "") -> tuple[str, str | None]:
        """Puts the run back into production that was there before.

        ``recipe``: the recipe name, needed if runs of several recipes are in production. Returns
        that run, and the one that was retired. Raises InputError if there is no earlier run.
        """
        with self._changing() as changes:
            lines = {name: of for name, of in self.lines().items() if of.current or of.before}
            if not recipe and len(lines) > 1:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self.out}: has models of several recipes ({list_names(sorted(lines))}). "
                    "Choose one with --recipe.",
                )
            name = recipe or next(iter(lines), "")
            line, here = lines.get(name, RecipeRuns()), {run.run_id for run in self.list_trained()}
            back = next((run_id for run_id in reversed(line.before) if run_id in here), None)
            if back is None:
                raise InputError(
                    Code.FILE_INVALID,
                    f"{self.out}: no earlier run{f' of recipe {name}' if name else ''} was in "
                    "production. Promote another run.",
                )
            changes.append(_change("rollback", back, name))
        return back, line.current

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
    def _changing(self) -> Iterator[list[Change]]:
        """Yields the list of changes to append to, and writes it, while others are locked out."""
        with lock_folder(self.out):
            changes = self.changes()
            known = len(changes)
            yield changes
            if len(changes) > known:
                text = json.dumps([asdict(change) for change in changes], indent=1) + "\n"
                write_atomic(self.out / FILE, text, durable=True)


def when_began(run_id: str, written_s: float) -> tuple[float, float, str]:
    """Returns the key by which runs are sorted: the second in the id, or otherwise the time at
    which the oldest copy of the recipe was written, which copying the folder changes. Runs of the
    same second are sorted by that time, then by id.
    """
    named = time_of_id(run_id)
    return (written_s if named is None else named, written_s, run_id)


def time_of_id(run_id: str) -> float | None:
    """Returns when a run began by its id, in seconds since 1970; None if a person has named it."""
    try:
        return datetime.strptime(run_id[:15] + "+0000", "%Y%m%d-%H%M%S%z").timestamp()
    except ValueError:
        return None


def user() -> str:
    """Returns the name of the user who runs this program, or the user id without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _change(act: Act, run: str, recipe: str) -> Change:
    return Change(act, run, recipe, utc(time.time()), user())


def _changes(content: object) -> list[Change]:
    """Parses changes. Raises ValueError or TypeError if they are invalid."""
    if not isinstance(content, list):
        raise TypeError("no list")
    changes = [Change(**item) for item in content]
    for change in changes:
        is_text = all(isinstance(value, str) for value in asdict(change).values())
        if not is_text or change.act not in get_args(Act) or not PLAIN_NAME.fullmatch(change.run):
            raise ValueError("no change")
    return changes


def _read_trained(path: Path) -> RegisteredRun | None:
    """Reads ``run.json`` of a process; None if its training has not finished, or it is damaged."""
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
    return RegisteredRun(run_id, clean(recipe.name), when_began(run_id, written_s), alone)
