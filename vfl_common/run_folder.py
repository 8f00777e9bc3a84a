"""A party's or the server's folder of one run: ``<out>/<run id>/<name>/``.

Only one process at a time may use the folder: it locks the file ``lock`` in the folder and writes
its name into that file. Readers need no lock.
"""

from __future__ import annotations

import contextlib
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
from vfl_common.files import PLAIN_NAME, lock_file, write_atomic, write_error
from vfl_common.process.logs import utc
from vfl_common.text import LINE, clean, list_names

if TYPE_CHECKING:
    from vfl_common.config.recipe import Recipe
    from vfl_common.stages import Planned

# The file with the results of a hyperparameter search, in the folder of the search.
SEARCH = "search.json"
LOCK = "lock"
# The files that a run's folder has in addition to run.json.
_OTHER_FILES = ("checkpoints", "recipe.json", "ledger.json")
# The maximum length of the name of the lock's holder, in bytes.
_MAX_HOLDER_BYTES = 300
# The text in run.json in which "true " replaces "false", which has the same length.
_UNFINISHED = '"finished": false'


log = logging.getLogger(__name__)


class CheckpointFiles(Protocol):
    """The interface of ``CheckpointStore``: the checkpoints of one party in one run."""

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
    """The folder of one run. Its ``run.json`` records the recipe of the run and whether the run is
    finished.

    ``checkpoints``: the checkpoints, or None if the process has none (the server, predictions).
    """

    path: Path
    run_id: str
    checkpoints: CheckpointFiles | None = None
    _unlock: weakref.finalize[[int], RunFolder] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def lock(self) -> None:
        """Locks the run for this process, until the process ends in any way or this object is
        deleted.

        Raises InputError that names the holder if another process uses the run. On a file system
        without locks, it only logs a warning.
        """
        if self._unlock is not None:
            return
        path = self.path / LOCK
        try:
            # The file is not truncated, because the name of the holder is read if the lock is
            # taken.
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise write_error(path, error) from None
        try:
            has_lock = lock_file(file, wait=False)
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
        if not has_lock:
            holder = (
                clean(os.read(file, _MAX_HOLDER_BYTES).decode("utf-8", "replace"), LINE)
                or "another process"
            )
            os.close(file)
            raise InputError(
                Code.FILE_INVALID,
                f"{self.path}: {holder} uses this run. Wait until that process ends, or end it.",
            )
        who = f"process {os.getpid()} on {socket.gethostname()}, since {utc(time.time())},"
        # If the disk is full, the run is locked without the name of the holder.
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
        """Marks this run so that it is not resumed. ``why``: the reason, as a sentence without
        private facts.
        """
        self.note(set_aside={"why": why, "at": utc(time.time())})

    @property
    def set_aside_reason(self) -> str:
        """The reason why this run is not resumed; '' if it was not set aside. Raises InputError as
        ``facts`` does.
        """
        note = self.facts().get("set_aside")
        return str(note.get("why", "")) or "it was set aside" if isinstance(note, dict) else ""

    def note(self, **facts: Any) -> None:
        """Adds facts to ``run.json`` and flushes the file to disk, because checkpoints need it."""
        text = _format_facts(self.facts() | facts)
        try:
            # Temporary files remain if a process was killed while it wrote run.json. They are
            # removed.
            for leftover in self.path.glob(".run.json.*"):
                leftover.unlink()
        except OSError as error:
            raise write_error(self.path, error) from None
        write_atomic(self.path / "run.json", text, durable=True)

    def prepare_finished_note(self) -> Callable[[], None]:
        """Prepares ``run.json`` for the mark that the run is finished. Returns a function that sets
        the mark by changing a few bytes of the file in mapped memory.

        If a process is killed after it has set the mark and before its exit, the same command would
        begin another run. So setting the mark must be the last step and must be fast; a file system
        call could wait for the journal. If a power failure undoes the mark, the same command finds
        nothing left to do.
        """
        path, text = self.path / "run.json", _format_facts(self.facts() | {"finished": False})
        write_atomic(path, text, durable=True)
        try:
            with path.open("r+b") as file:
                content = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise write_error(path, error) from None
        offset = text.rindex(_UNFINISHED) + len(_UNFINISHED) - len("false")
        # This first write makes the file system allocate the page now, not when the mark is set.
        content[offset] = content[offset]

        def note() -> None:
            content[offset : offset + len("false")] = b"true "

        return note

    @property
    def written_ns(self) -> int:
        """The time at which ``run.json`` was last written, in nanoseconds since 1970."""
        return (self.path / "run.json").stat().st_mtime_ns

    def facts(self) -> dict[str, Any]:
        """Reads ``run.json``. Returns an empty dict if it was not written yet. Raises InputError if
        it is damaged.
        """
        return _read_facts(self.path / "run.json")

    def recipe(self) -> Recipe:
        """Reads the run's copy of the recipe. Raises InputError if it is missing or damaged."""
        # The import is here because a command that only lists runs should not load pydantic models
        # and numpy.
        from vfl_common.config.recipe import read_recorded_recipe

        path = self.path / "recipe.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _missing_recipe_error(path, error.strerror) from None
        except (ValueError, RecursionError):
            raise _missing_recipe_error(path, "not JSON") from None
        return read_recorded_recipe(value, str(path))


# {key of run.json that ends a run: the words for it in a message}.
_END_WORDS = {
    "trained": "has been finished",
    "finished": "has been finished",
    "set_aside": "has been set aside",
}


def create(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder:
    """Creates the folder of a run, or opens the folder of an unfinished run with the same recipe.
    Locks the folder and writes the recipe into it.

    Raises InputError if the folder cannot be written, if another process uses it, or if it has
    another recipe or a run that is finished or set aside. Nothing is overwritten.
    """
    path = out / run_id / name
    folder = RunFolder(path, run_id)
    try:
        facts = folder.facts()
        end = next((what for key, what in _END_WORDS.items() if facts.get(key)), None)
        if end or (facts and facts.get("recipe_digest") != recipe.digest()):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: this run {end or 'has another recipe'}. Give the new run another name.",
            )
        path.mkdir(parents=True, exist_ok=True)
        folder.lock()
        # run.json is written first, because a folder with other files but without run.json counts
        # as damaged.
        folder.note(run_id=run_id, recipe_digest=recipe.digest())
        write_atomic(path / "recipe.json", _format_recipe(recipe))
    except OSError as error:
        raise write_error(path, error) from None
    return folder


def find_unfinished(out: Path, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the newest unfinished run of the party ``name`` under ``out`` with the same recipe.
    Runs that were set aside are ignored.

    A server's started runs are preferred to runs that have not started. Otherwise a second server
    that was started by mistake would leave a newer, unstarted run, and the parties would leave the
    run that they train.

    Raises InputError if a damaged ``run.json`` may belong to this run, because otherwise all
    parties would begin again.
    """

    def raise_if_ours(path: Path, error: InputError) -> None:
        if _may_have_recipe(path, recipe):
            raise error

    folders = _find_unfinished(out, name, recipe, raise_if_ours)
    candidates = [
        (bool(folder.facts().get("generation")), folder.written_ns, folder.path)
        for folder in folders
    ]
    return RunFolder(path := max(candidates)[2], path.parent.name) if candidates else None


def set_all_aside(out: Path, name: str, recipe: Recipe, why: str, *, but: str) -> list[str]:
    """Sets aside all unfinished runs that ``find_unfinished`` could find, except the run ``but``.
    Returns their ids.

    Runs that another process uses are left out, and so are runs with a damaged ``run.json``, which
    cannot be resumed.
    """
    run_ids = []
    for folder in list(_find_unfinished(out, name, recipe, lambda _path, _error: None)):
        with contextlib.suppress(InputError):
            if folder.run_id != but:
                folder.lock()
                folder.set_aside(why)
                run_ids.append(folder.run_id)
        folder.unlock()
    return run_ids


def _find_unfinished(
    out: Path, name: str, recipe: Recipe, damaged: Callable[[Path, InputError], None]
) -> Iterator[RunFolder]:
    """Yields all unfinished runs. For each folder with a damaged ``run.json``, calls ``damaged``
    with the folder and the error.
    """
    digest = recipe.digest()
    for path in (path for path in out.glob(f"*/{name}") if path.is_dir()):
        folder = RunFolder(path, path.parent.name)
        try:
            facts = folder.facts()
        except InputError as error:
            damaged(path, error)
            continue
        has_ended = facts.get("finished") or facts.get("set_aside")
        if facts.get("recipe_digest") == digest and not has_ended and facts.get("job") == "train":
            yield folder


def find_finished(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder | None:
    """Returns the run ``run_id`` of the party ``name`` under ``out`` if it is finished and has the
    same recipe; otherwise None.
    """
    folder = RunFolder(out / run_id / name, run_id)
    if not PLAIN_NAME.fullmatch(run_id):
        return None
    facts = folder.facts()
    return (
        folder if facts.get("finished") and facts.get("recipe_digest") == recipe.digest() else None
    )


def _format_facts(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1) + "\n"


def _read_facts(path: Path) -> dict[str, Any]:
    why = "is not a JSON object"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(facts, dict):
            return facts
    except FileNotFoundError:
        other_files = [name for name in _OTHER_FILES if (path.parent / name).exists()]
        if not other_files:
            return {}
        why = f"is missing, but its folder has {list_names(other_files)}"
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


def _may_have_recipe(folder: Path, recipe: Recipe) -> bool:
    """Returns whether a folder with a damaged ``run.json`` may contain a run of the recipe."""
    try:
        text = (folder / "recipe.json").read_text(encoding="utf-8")
        return text == _format_recipe(recipe) or not isinstance(json.loads(text), dict)
    except FileNotFoundError:
        return any((folder / name).exists() for name in _OTHER_FILES)
    except (OSError, ValueError, RecursionError):
        return True


def _format_recipe(recipe: Recipe) -> str:
    return recipe.canonical_json() + "\n"


def read_plan(folder: RunFolder | None) -> list[Planned]:
    """Returns the planned phases of an unfinished run; an empty list if the run ended before
    planning. Raises InputError.
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
