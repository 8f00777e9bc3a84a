"""A party's or the server's folder of one run: ``<out>/<run id>/<name>/``.

One process at a time uses it: it locks the file ``lock`` in it, and writes its name there. Readers
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
from vfl_common.files import PLAIN_NAME, write_atomic, write_error
from vfl_common.process.logs import utc
from vfl_common.text import LINE, clean, list_names

if TYPE_CHECKING:
    from vfl_common.config.recipe import Recipe
    from vfl_common.stages import Planned

# The results of a search, in its folder.
SEARCH = "search.json"
LOCK = "lock"
# The other files of a run's folder.
_WRITTEN = ("checkpoints", "recipe.json", "ledger.json")
# The most bytes of the name of the lock's holder.
_MAX_HOLDER_BYTES = 300
# In run.json; "true " has the same length as "false", and replaces it.
_UNFINISHED = '"finished": false'


log = logging.getLogger(__name__)


class CheckpointFiles(Protocol):
    """The checkpoints of one party and run, as ``CheckpointStore`` keeps them."""

    def save(self, label: str, tree: Any) -> object: ...
    def save_later(self, label: str, tree: Any) -> object: ...
    def flush(self) -> None: ...
    def load(self, label: str) -> Any: ...
    def labels(self) -> list[str]: ...
    def count_saved(self) -> int: ...
    def whole(self) -> list[str]: ...
    def discard_after(self, label: str) -> None: ...


@dataclass
class RunFolder:
    """The folder; ``run.json`` in it says which recipe the run has and whether it is finished.

    ``checkpoints`` is None if this process has none (the server, predictions).
    """

    path: Path
    run_id: str
    checkpoints: CheckpointFiles | None = None
    _unlock: weakref.finalize[[int], RunFolder] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def lock(self) -> None:
        """Keeps all other processes out of the run until this one ends, however it ends, or this
        object is deleted.

        Raises InputError, which names the holder, if another process uses the run. On a file system
        without locks it only warns.
        """
        if self._unlock is not None:
            return
        path = self.path / LOCK
        try:
            # Not truncated: the name of the holder is read if the lock is taken.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise write_error(path, error) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = (
                clean(os.read(file, _MAX_HOLDER_BYTES).decode("utf-8", "replace"), LINE)
                or "another process"
            )
            os.close(file)
            raise InputError(
                Code.FILE_INVALID,
                f"{self.path}: {holder} uses this run. Wait until that process ends, or end it.",
            ) from None
        except OSError as error:
            os.close(file)
            log.warning(
                "%s: this file system has no locks (%s). Make sure that only one process at a time "
                "uses the folder.",
                self.path,
                error.strerror,
                extra={"event": "unlocked"},
            )
            return
        who = f"process {os.getpid()} on {socket.gethostname()}, since {utc(time.time())},"
        # If the disk is full, the lock holds without a name.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.write(file, who.encode())
        self._unlock = weakref.finalize(self, os.close, file)

    def unlock(self) -> None:
        """Lets other processes use the run."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    def set_aside(self, why: str) -> None:
        """Marks this run as one that is not resumed. ``why``: a sentence that everybody may "
        "read."""
        self.note(set_aside={"why": why, "at": utc(time.time())})

    @property
    def set_aside_reason(self) -> str:
        """Why this run is not resumed; '' if it was not set aside. Raises InputError as ``facts``
        does.
        """
        note = self.facts().get("set_aside")
        return str(note.get("why", "")) or "it was set aside" if isinstance(note, dict) else ""

    def note(self, **facts: Any) -> None:
        """Adds facts to ``run.json`` and flushes it to disk, because checkpoints need it."""
        text = _json(self.facts() | facts)
        try:
            # Removes what a process left that was killed while it wrote.
            for left in self.path.glob(".run.json.*"):
                left.unlink()
        except OSError as error:
            raise write_error(self.path, error) from None
        write_atomic(self.path / "run.json", text, durable=True)

    def prepare_finished_note(self) -> Callable[[], None]:
        """Prepares the note that the run is finished. Returns a function that writes it: it changes
        a few bytes of ``run.json`` in mapped memory.

        A process that is killed after the note and before its exit begins another run when it is
        started again. So the note must be the last step, and fast: a call of the file system may
        have to wait for its journal. If a power failure undoes the note, the process that is
        started again finds that nothing is left to do.
        """
        path, text = self.path / "run.json", _json(self.facts() | {"finished": False})
        write_atomic(path, text, durable=True)
        try:
            with path.open("r+b") as file:
                content = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise write_error(path, error) from None
        place = text.rindex(_UNFINISHED) + len(_UNFINISHED) - len("false")
        # The first write to the page makes the file system allocate it now.
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
        # Imported here, because a command that lists runs needs neither pydantic models nor numpy.
        from vfl_common.config.recipe import read_recorded_recipe

        path = self.path / "recipe.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _missing_recipe_error(path, error.strerror) from None
        except (ValueError, RecursionError):
            raise _missing_recipe_error(path, "not JSON") from None
        return read_recorded_recipe(value, str(path))


_OVER = {
    "trained": "has been finished",
    "finished": "has been finished",
    "set_aside": "has been set aside",
}


def create(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder:
    """Creates the folder, or opens that of an unfinished run of the same recipe; locks it, and
    writes the recipe into it.

    Raises InputError if it cannot be written, if another process uses it, or if it holds a run that
    is finished or set aside, or another recipe: nothing is overwritten.
    """
    path = out / run_id / name
    folder = RunFolder(path, run_id)
    try:
        facts = folder.facts()
        over = next((what for key, what in _OVER.items() if facts.get(key)), None)
        if over or (facts and facts.get("recipe_digest") != recipe.digest()):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: this run {over or 'has another recipe'}. Give the new run another name.",
            )
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        # Written first, because without it a folder with other files counts as damaged.
        folder.note(run_id=run_id, recipe_digest=recipe.digest())
        write_atomic(path / "recipe.json", _text(recipe))
    except OSError as error:
        raise write_error(path, error) from None
    return folder


def find_unfinished(out: Path, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the newest unfinished run of ``name`` under ``out`` with the same recipe, unless it was
    set aside.

    A server's runs that have started are preferred to those that have not: a second server that is
    started by mistake, and cannot listen or is stopped, leaves a run that has not started. With it,
    the parties leave the run in which they train.

    Raises InputError if a ``run.json`` is damaged that may be this run's: without it, all parties
    begin again.
    """

    def raise_if_ours(path: Path, error: InputError) -> None:
        if _may_be(path, recipe):
            raise error

    folders = _find_unfinished(out, name, recipe, raise_if_ours)
    candidates = [
        (bool(folder.facts().get("generation")), folder.written_ns, folder.path)
        for folder in folders
    ]
    return RunFolder(path := max(candidates)[2], path.parent.name) if candidates else None


def set_all_aside(out: Path, name: str, recipe: Recipe, why: str, *, but: str) -> list[str]:
    """Sets aside all unfinished runs that ``find_unfinished`` can find, except one; returns their
    ids.

    It leaves out those that another process uses, and those whose ``run.json`` is damaged, which
    nobody can resume.
    """
    aside = []
    for folder in list(_find_unfinished(out, name, recipe, lambda _path, _error: None)):
        with contextlib.suppress(InputError):
            if folder.run_id != but:
                folder.lock()
                folder.set_aside(why)
                aside.append(folder.run_id)
        folder.unlock()
    return aside


def _find_unfinished(
    out: Path, name: str, recipe: Recipe, damaged: Callable[[Path, InputError], None]
) -> Iterator[RunFolder]:
    """Yields all unfinished runs; calls ``damaged`` with each folder whose ``run.json`` is damaged,
    and the error.
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
        others = [name for name in _WRITTEN if (path.parent / name).exists()]
        if not others:
            return {}
        why = f"is missing, but its folder has {list_names(others)}"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        pass
    raise _damage_error(path, why)


def _missing_recipe_error(path: Path, reason: str | None) -> InputError:
    return InputError(
        Code.FILE_INVALID,
        f"{path}: cannot be read ({reason}). Copy it from the folder of another process of this "
        "run, which has the same file.",
    )


def _damage_error(path: Path, why: str) -> InputError:
    return InputError(
        Code.FILE_INVALID,
        f"{path}: {why}. Restore it, or begin a new run with --fresh at the server and here.",
    )


def _may_be(folder: Path, recipe: Recipe) -> bool:
    """Returns whether a folder whose ``run.json`` is damaged may hold a run of the recipe."""
    try:
        text = (folder / "recipe.json").read_text(encoding="utf-8")
        return text == _text(recipe) or not isinstance(json.loads(text), dict)
    except FileNotFoundError:
        return any((folder / name).exists() for name in _WRITTEN)
    except (OSError, ValueError, RecursionError):
        return True


def _text(recipe: Recipe) -> str:
    return recipe.canonical_json() + "\n"


def read_plan(folder: RunFolder | None) -> list[Planned]:
    """Returns the phases that an unfinished run has planned; empty if it ended before planning.
    Raises InputError.
    """
    from vfl_common.stages import Planned

    if folder is None:
        return []
    try:
        plan = [
            Planned(**{**phase, "skippable": tuple(phase["skippable"])})
            for phase in folder.facts().get("plan", [])
        ]
        if not all(isinstance(phase.rounds, int) for phase in plan):
            raise TypeError
        return plan
    except (TypeError, KeyError):
        raise _damage_error(folder.path / "run.json", "has an unreadable plan") from None
