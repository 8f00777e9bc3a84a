"""A party's or the server's folder of one run: ``<out>/<run id>/<name>/``.

One process at a time has it: it locks the file ``lock`` in it, in which it says who it is. Readers
need no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vfl_common.errors import Code, InputError
from vfl_common.files import PLAIN_NAME, unwritable, write_atomic
from vfl_common.process.logs import utc
from vfl_common.text import LINE, clean, listed

if TYPE_CHECKING:
    from vfl_common.config.recipe import Recipe
    from vfl_common.stages import Planned

# What a search has found, in its folder.
SEARCH = "search.json"
LOCK = "lock"
# What a run leaves beside run.json.
_WRITTEN = ("checkpoints", "recipe.json", "ledger.json")
# Bytes of who has the lock.
_MOST_HOLDER = 300
# With as many bytes as a finished run's, and a blank.
_UNFINISHED = '"finished": false'


log = logging.getLogger(__name__)


class Store(Protocol):
    """Checkpoints of one party and run: a party's ``CheckpointStore``."""

    def save(self, label: str, tree: Any) -> object: ...
    def save_later(self, label: str, tree: Any) -> object: ...
    def flush(self) -> None: ...
    def load(self, label: str) -> Any: ...
    def labels(self) -> list[str]: ...
    def saved(self) -> int: ...
    def whole(self) -> list[str]: ...
    def discard_after(self, label: str) -> None: ...


@dataclass
class RunFolder:
    """The folder; ``run.json`` in it says which recipe the run has and whether it is finished.

    ``checkpoints`` is None if nothing can be resumed from here (the server, predictions).
    """

    path: Path
    run_id: str
    checkpoints: Store | None = None
    _unlock: weakref.finalize[[int], RunFolder] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def lock(self) -> None:
        """Keeps every other process out of the run until this one ends, however it ends, or this
        object is dropped.

        Raises InputError, with who has the run, if another process has it. On a file system without
        locks it only warns.
        """
        if self._unlock is not None:
            return
        path = self.path / LOCK
        try:
            # It is overwritten.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise unwritable(path, error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (
                clean(os.read(file, _MOST_HOLDER).decode("utf-8", "replace"), LINE)
                or "another process"
            )
            os.close(file)
            text = f"{self.path}: {holder} has this run; wait until that process ends, or end it"
            raise InputError(Code.FILE_INVALID, text) from None
        except OSError as error:
            os.close(file)
            text = (
                "%s: this file system has no locks (%s); see to it that only one process at a "
                "time uses the folder"
            )
            log.warning(text, self.path, error.strerror, extra={"event": "unlocked"})
            return
        who = f"process {os.getpid()} on {socket.gethostname()}, since {utc(time.time())},"
        # A full disk; the lock holds.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.write(file, who.encode())
        self._unlock = weakref.finalize(self, os.close, file)

    def unlock(self) -> None:
        """Lets other processes have the run."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def set_aside(self, why: str) -> None:
        """Notes that nobody resumes this run, and why: a sentence that may be shown to all."""
        self.note(set_aside={"why": why, "at": utc(time.time())})

    @property
    def why_aside(self) -> str:
        """Why nobody resumes this run; '' if it was not set aside. Raises InputError as
        ``facts``.
        """
        noted = self.facts().get("set_aside")
        return str(noted.get("why", "")) or "it was set aside" if isinstance(noted, dict) else ""

    def note(self, **facts: Any) -> None:
        """Adds facts to ``run.json``, which then is on the disk: checkpoints are of no use without
        it.
        """
        text = _json(self.facts() | facts)
        try:
            # A process was killed while it wrote.
            for left in self.path.glob(".run.json.*"):
                left.unlink()
        except OSError as error:
            raise unwritable(self.path, error) from None
        write_atomic(self.path / "run.json", text, durable=True)

    def finishing(self) -> Callable[[], None]:
        """Prepares the note that the run is finished. Returns what makes it: a few bytes of
        ``run.json`` in memory.

        A process that is killed after the note, and before its exit, would begin another run when
        it is started again. So nothing may come between them, and a call of the file system, which
        may have to wait for its journal, would. If a power failure undoes the note, the process
        that is started again finds that nothing is left to do.
        """
        path, text = self.path / "run.json", _json(self.facts() | {"finished": False})
        write_atomic(path, text, durable=True)
        try:
            with path.open("r+b") as file:
                content = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise unwritable(path, error) from None
        place = text.rindex(_UNFINISHED) + len(_UNFINISHED) - len("false")
        # The file system has its part done with this.
        content[place] = content[place]

        def note() -> None:
            content[place : place + len("false")] = b"true "

        return note

    @property
    def written_ns(self) -> int:
        """When ``run.json`` was written last, in nanoseconds since the epoch."""
        return (self.path / "run.json").stat().st_mtime_ns

    def facts(self) -> dict[str, Any]:
        """Reads ``run.json``; empty before it is written. Raises InputError if it is damaged."""
        return _facts(self.path / "run.json")

    def recipe(self) -> Recipe:
        """Reads the run's recipe. Raises InputError if the copy of it is missing or damaged."""
        # Late, because a command that lists runs needs neither the recipe's models nor numpy.
        from vfl_common.config.recipe import recorded_recipe

        path = self.path / "recipe.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except (ValueError, RecursionError):
            why = "is not JSON"
        else:
            return recorded_recipe(value, str(path))
        text = (
            f"{path}: {why}; copy it from the folder of another process of this run, which has "
            "the same"
        )
        raise InputError(Code.FILE_INVALID, text)


_OVER = {
    "trained": "has been finished",
    "finished": "has been finished",
    "set_aside": "has been set aside",
}


def create(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder:
    """Makes the folder, or opens that of an unfinished run of the same recipe; locks it, writes the
    recipe into it.

    Raises InputError if it cannot be written, if another process has it, or if it holds a run that
    is finished or set aside, or another recipe: nothing is overwritten.
    """
    path = out / run_id / name
    folder = RunFolder(path, run_id)
    try:
        facts = folder.facts()
        over = next((what for key, what in _OVER.items() if facts.get(key)), None)
        if over or (facts and facts.get("recipe_digest") != recipe.digest()):
            what = over or "has another recipe"
            raise InputError(
                Code.FILE_INVALID, f"{path}: this run {what}; give the new run another name"
            )
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        # First: without it, what else lies here is damaged.
        folder.note(run_id=run_id, recipe_digest=recipe.digest())
        write_atomic(path / "recipe.json", _text(recipe))
    except OSError as error:
        raise unwritable(path, error) from None
    return folder


def find_unfinished(out: Path, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the newest unfinished run of ``name`` under ``out`` with the same recipe, unless it was
    set aside.

    A server's run that has never started goes behind those that have: a server that is started
    beside a living one, and cannot listen or is stopped, leaves such a run. The parties would leave
    the run in which they train for it.

    Raises InputError if a ``run.json`` is damaged that may be this run's: without it, all parties
    would begin anew.
    """

    def damaged(path: Path, error: InputError) -> None:
        if _may_be(path, recipe):
            raise error

    folders = _unfinished(out, name, recipe, damaged)
    found = [
        (bool(folder.facts().get("generation")), folder.written_ns, folder.path)
        for folder in folders
    ]
    return RunFolder(path := max(found)[2], path.parent.name) if found else None


def set_all_aside(out: Path, name: str, recipe: Recipe, why: str, *, but: str) -> list[str]:
    """Sets aside all unfinished runs that ``find_unfinished`` could find, but one; returns their
    ids.

    Not those that another process has, and not those whose ``run.json`` is damaged: nobody can
    resume them.
    """
    aside = []
    for folder in list(_unfinished(out, name, recipe, lambda _path, _error: None)):
        with contextlib.suppress(InputError):
            if folder.run_id != but:
                folder.lock()
                folder.set_aside(why)
                aside.append(folder.run_id)
        folder.unlock()
    return aside


def _unfinished(
    out: Path, name: str, recipe: Recipe, damaged: Callable[[Path, InputError], None]
) -> Iterator[RunFolder]:
    """Finds all unfinished runs; calls ``damaged`` with each folder whose ``run.json`` is, and with
    the error.
    """
    digest = recipe.digest()
    for path in (path for path in out.glob(f"*/{name}") if path.is_dir()):
        folder = RunFolder(path, path.parent.name)
        try:
            facts = folder.facts()
        except InputError as error:
            damaged(path, error)
            continue
        over = facts.get("finished") or facts.get("set_aside")
        if facts.get("recipe_digest") == digest and not over and facts.get("job") == "train":
            yield folder


def find_finished(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the run of ``name`` with that id under ``out``, if it is finished and has the same
    recipe.
    """
    folder = RunFolder(out / run_id / name, run_id)
    if not PLAIN_NAME.fullmatch(run_id):
        return None
    facts = folder.facts()
    return (
        folder if facts.get("finished") and facts.get("recipe_digest") == recipe.digest() else None
    )


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1) + "\n"


def _facts(path: Path) -> dict[str, Any]:
    why = "is not a JSON object"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(facts, dict):
            return facts
    except FileNotFoundError:
        beside = [name for name in _WRITTEN if (path.parent / name).exists()]
        if not beside:
            return {}
        why = f"is missing, and {listed(beside)} {'lies' if len(beside) == 1 else 'lie'} beside it"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        pass
    raise _damaged(path, why)


def _damaged(path: Path, why: str) -> InputError:
    text = f"{path}: {why}; restore it, or begin a new run with --fresh at the server and here"
    return InputError(Code.FILE_INVALID, text)


def _may_be(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder whose ``run.json`` is damaged may hold a run of the recipe: not that of
    another one.
    """
    try:
        text = (folder / "recipe.json").read_text(encoding="utf-8")
        return text == _text(recipe) or not isinstance(json.loads(text), dict)
    except FileNotFoundError:
        return any((folder / name).exists() for name in _WRITTEN)
    except (OSError, ValueError, RecursionError):
        return True


def _text(recipe: Recipe) -> str:
    return recipe.canonical_json() + "\n"


def planned(folder: RunFolder | None) -> list[Planned]:
    """Returns the phases that an unfinished run has planned; empty if it ended before that. Raises
    InputError.
    """
    from vfl_common.stages import Planned

    if folder is None:
        return []
    try:
        plan = [
            Planned(**{**each, "skippable": tuple(each["skippable"])})
            for each in folder.facts().get("plan", [])
        ]
        if not all(isinstance(phase.rounds, int) for phase in plan):
            raise TypeError
        return plan
    except (TypeError, KeyError):
        raise _damaged(folder.path / "run.json", "has a plan that cannot be read") from None
