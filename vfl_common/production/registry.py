"""Which trained run is in production: ``models.json`` in a party's folder of runs.

The file has all changes, the oldest first. A trained run is a candidate until it is promoted. One
run of each recipe's name is in production: a promotion retires the run that was. Each party keeps
its own file; the ids of runs are the same at all parties, so the server of a joint prediction sees
whether they mean the same run.
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
from vfl_common.files import PLAIN_NAME, locked, write_atomic
from vfl_common.process.logs import utc
from vfl_common.run_folder import RunFolder
from vfl_common.text import clean, listed

FILE = "models.json"
LATEST, PRODUCTION = "latest", "production"
# What stands for a run.
WORDS = (LATEST, PRODUCTION)
Stage = Literal["candidate", "production", "retired"]
Act = Literal["promote", "rollback", "retire"]


@dataclass(frozen=True)
class Change:
    """One change of a stage. ``run``: what was promoted or retired; of a rollback, the run that
    came back.
    """

    act: Act
    run: str
    recipe: str
    at: str
    who: str


@dataclass
class Line:
    """The runs of one recipe's name. ``before``: those that were in production, the newest last."""

    current: str | None = None
    before: list[str] = field(default_factory=list)
    retired: set[str] = field(default_factory=set)

    def apply(self, change: Change) -> None:
        """Follows one change."""
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
            self.before = [each for each in self.before if each != run]
            self.current = None if run == self.current else self.current

    def _take(self, run: str) -> None:
        self.current = run
        self.before = [each for each in self.before if each != run]
        self.retired.discard(run)

    def stage(self, run: str) -> Stage:
        """Returns the stage of a trained run of this recipe's name."""
        if run == self.current:
            return "production"
        return "retired" if run in self.retired else "candidate"


@dataclass(frozen=True)
class Trained:
    """A run that was trained to its end, as the folder of a party shows. ``recipe``: its name;
    ``began``: see ``when_began``; ``alone``: whether it had one party only, as a baseline has.
    """

    run_id: str
    recipe: str
    began: tuple[float, float, str]
    alone: bool = False


class ModelRegistry:
    """The registry of one folder of runs. ``party``: only this party's runs count; '': any
    party's.
    """

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
                Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})"
            ) from None
        except (ValueError, TypeError, RecursionError):
            text = f"{path}: is damaged; restore it, or remove it and promote a run again"
            raise InputError(Code.FILE_INVALID, text) from None

    def lines(self) -> dict[str, Line]:
        """Returns {recipe's name: its runs' stages}. Raises InputError."""
        found: dict[str, Line] = {}
        for change in self.changes():
            found.setdefault(change.recipe, Line()).apply(change)
        return found

    def trained(self) -> list[Trained]:
        """Returns the runs in the folder that a party has trained to the end, the newest first."""
        paths = self.out.glob(f"*/{self._party or '*'}/run.json")
        known: dict[str, Trained] = {}
        for each in filter(None, map(_trained, sorted(paths))):
            known[each.run_id] = min(each, known.get(each.run_id, each), key=lambda one: one.began)
        return sorted(known.values(), key=lambda each: each.began, reverse=True)

    def find(self, word: str, recipe: str = "") -> str:
        """Returns the id of the run that ``latest`` or ``production`` means. A run of one party,
        such as a baseline's, is the latest only if there is no other.

        Args:
            word: one of ``WORDS``.
            recipe: the recipe's name; '': that of the only runs here.

        Raises InputError if there is none, or if runs of several recipes could be meant.
        """
        runs = self.trained()
        if word == LATEST:
            best_last = sorted(runs, key=lambda each: (not each.alone, each.began))
            known = {each.recipe: each.run_id for each in best_last}
            what, remedy = "trained run", "train one first"
        else:
            known = {name: of.current for name, of in self.lines().items() if of.current}
            what, remedy = "run in production", "promote one: vfl models promote RUN"
        if not recipe and len(known) > 1:
            text = f"{self.out}: {word} could mean runs of several recipes"
            raise InputError(
                Code.CONFIG_INVALID, f"{text} ({listed(sorted(known))}); give the folder of the run"
            )
        found = known.get(recipe) if recipe else next(iter(known.values()), None)
        if found is None:
            of = f" of recipe {recipe}" if recipe else ""
            raise InputError(Code.FILE_INVALID, f"{self.out}: holds no {what}{of}; {remedy}")
        if all(each.run_id != found for each in runs):
            text = f"{self.out}: run {found} is in production, and its folder holds no trained run"
            raise InputError(
                Code.FILE_INVALID, f"{text}; restore it, or roll back: vfl models rollback"
            )
        return found

    def folder(self, given: str, recipe: str = "") -> Path:
        """Returns the folder of the run that a person names: by a path, by its id if it is in this
        folder of runs, or by one of ``WORDS``, see ``find``. Raises InputError.
        """
        if given in WORDS:
            return self.out / self.find(given, recipe)
        by_id = self.out / given
        known = PLAIN_NAME.fullmatch(given) is not None and by_id.is_dir()
        return by_id if known and not Path(given).exists() else Path(given)

    def stage(self, run_id: str) -> Stage:
        """Returns the stage of a trained run. Raises InputError if none here has this id."""
        return self.lines().get(self._recipe_of(run_id), Line()).stage(run_id)

    def promote(self, run_id: str) -> str | None:
        """Puts a trained run into production; returns the one that was. Raises InputError.

        If it is in production already, nothing changes.
        """
        recipe = self._recipe_of(run_id)
        with self._changing() as changes:
            before = self.lines().get(recipe, Line()).current
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
        """Puts the run back into production that was before. ``recipe``: its name, needed if runs
        of several are in production.

        Returns that run, and the one that was retired. Raises InputError if there is none.
        """
        with self._changing() as changes:
            lines = {name: of for name, of in self.lines().items() if of.current or of.before}
            if not recipe and len(lines) > 1:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{self.out}: has models of several recipes ({listed(sorted(lines))}); say "
                    "which with --recipe",
                )
            name = recipe or next(iter(lines), "")
            line, here = lines.get(name, Line()), {each.run_id for each in self.trained()}
            back = next((each for each in reversed(line.before) if each in here), None)
            if back is None:
                text = f"{self.out}: no earlier run{f' of recipe {name}' if name else ''} is here"
                raise InputError(
                    Code.FILE_INVALID, f"{text} that was in production; promote another run"
                )
            changes.append(_change("rollback", back, name))
        return back, line.current

    def _recipe_of(self, run_id: str) -> str:
        found = next((each for each in self.trained() if each.run_id == run_id), None)
        if found is None:
            text = f"{self.out / run_id}: is no run that was trained to its end here"
            raise InputError(Code.FILE_INVALID, f"{text}; vfl models lists those that were")
        return found.recipe

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Change]]:
        """Gives the list of changes to add to, and writes it; nobody else changes it meanwhile."""
        with locked(self.out):
            changes = self.changes()
            known = len(changes)
            yield changes
            if len(changes) > known:
                text = json.dumps([asdict(each) for each in changes], indent=1) + "\n"
                write_atomic(self.out / FILE, text, durable=True)


def when_began(run_id: str, written_s: float) -> tuple[float, float, str]:
    """Returns by what runs are put in order: the second in the id, or else the time at which the
    oldest copy of the recipe was written, which a copy of the folder changes. Of runs of the same
    second that time decides, then the id.
    """
    named = named_time(run_id)
    return (written_s if named is None else named, written_s, run_id)


def named_time(run_id: str) -> float | None:
    """Returns when a run began, in seconds since 1970, as its id says; None if a person has named
    it.
    """
    try:
        return datetime.strptime(run_id[:15] + "+0000", "%Y%m%d-%H%M%S%z").timestamp()
    except ValueError:
        return None


def user() -> str:
    """Returns the name of the system's user who runs this program, or the number if it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _change(act: Act, run: str, recipe: str) -> Change:
    return Change(act, run, recipe, utc(time.time()), user())


def _changes(found: object) -> list[Change]:
    """Raises ValueError or TypeError if these are no changes."""
    if not isinstance(found, list):
        raise TypeError("no list")
    changes = [Change(**each) for each in found]
    for each in changes:
        is_text = all(isinstance(value, str) for value in asdict(each).values())
        if not is_text or each.act not in get_args(Act) or not PLAIN_NAME.fullmatch(each.run):
            raise ValueError("no change")
    return changes


def _trained(path: Path) -> Trained | None:
    """Reads a process's ``run.json``; None if it has trained nothing to the end, or is damaged."""
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
    return Trained(run_id, clean(recipe.name), when_began(run_id, written_s), alone)
