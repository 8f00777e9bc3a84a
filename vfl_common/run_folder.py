"""A party's or the server's folder of one run: ``<out>/<run id>/<name>/``."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vfl_common.config.recipe import Recipe, recorded_recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import PLAIN_NAME, unwritable, write_atomic
from vfl_common.stages import Planned

_UNFINISHED = '"finished": false'  # with as many bytes as a finished run's, and a blank


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

    def note(self, **facts: Any) -> None:
        """Adds facts to ``run.json``, which then is on the disk: checkpoints are of no use without it."""
        text = _json(self.facts() | facts)
        try:
            for left in self.path.glob(".run.json.*"):  # a process was killed while it wrote
                left.unlink()
        except OSError as error:
            raise unwritable(self.path, error) from None
        write_atomic(self.path / "run.json", text, durable=True)

    def finishing(self) -> Callable[[], None]:
        """Prepares the note that the run is finished. Returns what makes it: a few bytes of ``run.json`` in memory.

        A process that is killed after the note, and before its exit, would begin another run when it is started again.
        So nothing may come between them, and a call of the file system, which may have to wait for its journal, would.
        If a power failure undoes the note, the process that is started again finds that nothing is left to do.
        """
        path, text = self.path / "run.json", _json(self.facts() | {"finished": False})
        write_atomic(path, text, durable=True)
        try:
            with path.open("r+b") as file:
                content = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            raise unwritable(path, error) from None
        place = text.rindex(_UNFINISHED) + len(_UNFINISHED) - len("false")
        content[place] = content[place]  # the file system has its part done with this

        def note() -> None:
            content[place : place + len("false")] = b"true "

        return note

    def facts(self) -> dict[str, Any]:
        """Reads ``run.json``; empty before it is written. Raises InputError if it is damaged."""
        return _facts(self.path / "run.json")

    def recipe(self) -> Recipe:
        """Reads the run's recipe. Raises InputError if the copy of it is missing or damaged."""
        path = self.path / "recipe.json"
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            why = f"cannot be read ({error.strerror})"
        except (ValueError, RecursionError):
            why = "is not JSON"
        else:
            return recorded_recipe(value, str(path))
        text = f"{path}: {why}; copy it from the folder of another process of this run, which has the same"
        raise InputError(Code.FILE_INVALID, text)


def create(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder:
    """Makes the folder, or opens that of an unfinished run of the same recipe; writes the recipe into it.

    Raises InputError if it cannot be written, or if it holds a finished run or another recipe: nothing is overwritten.
    """
    path = out / run_id / name
    folder = RunFolder(path, run_id)
    try:
        facts = folder.facts()
        if facts and (facts.get("trained") or facts.get("finished") or facts.get("recipe_digest") != recipe.digest()):
            what = "has been finished" if facts.get("finished") or facts.get("trained") else "has another recipe"
            raise InputError(Code.FILE_INVALID, f"{path}: this run {what}; give the new run another name")
        path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / "recipe.json", _text(recipe))
        folder.note(run_id=run_id, recipe_digest=recipe.digest())
    except OSError as error:
        raise unwritable(path, error) from None
    return folder


def find_unfinished(out: Path, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the newest unfinished run of ``name`` under ``out`` with the same recipe.

    Raises InputError if a ``run.json`` is damaged that may be this run's: without it, all parties would begin anew.
    """
    digest = recipe.digest()
    found = []
    for path in (folder / "run.json" for folder in out.glob(f"*/{name}") if folder.is_dir()):
        try:
            facts = _facts(path)
        except InputError:
            if _may_be(path.parent, recipe):
                raise
            continue
        if facts.get("recipe_digest") == digest and not facts.get("finished") and facts.get("job") == "train":
            found.append((path.stat().st_mtime_ns, path.parent))
    if not found:
        return None
    path = max(found)[1]
    return RunFolder(path, path.parent.name)


def find_finished(out: Path, run_id: str, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the run of ``name`` with that id under ``out``, if it is finished and has the same recipe."""
    folder = RunFolder(out / run_id / name, run_id)
    if not PLAIN_NAME.fullmatch(run_id):
        return None
    facts = folder.facts()
    return folder if facts.get("finished") and facts.get("recipe_digest") == recipe.digest() else None


def _json(facts: dict[str, Any]) -> str:
    return json.dumps(facts, indent=1) + "\n"


def _facts(path: Path) -> dict[str, Any]:
    why = "is not a JSON object"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(facts, dict):
            return facts
    except FileNotFoundError:
        if not (path.parent / "checkpoints").is_dir():
            return {}
        why = "is missing, and checkpoints lie beside it"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        pass
    raise _damaged(path, why)


def _damaged(path: Path, why: str) -> InputError:
    what = f"restore it, or remove {path.parent} to go on without it"
    text = f"{path}: {why}; {what}, or begin a new run with --fresh at the server and every party"
    return InputError(Code.FILE_INVALID, text)


def _may_be(folder: Path, recipe: Recipe) -> bool:
    """Whether a folder whose ``run.json`` is damaged may hold a run of the recipe: not that of another one."""
    try:
        text = (folder / "recipe.json").read_text(encoding="utf-8")
        return text == _text(recipe) or not isinstance(json.loads(text), dict)
    except FileNotFoundError:
        return (folder / "checkpoints").is_dir()
    except (OSError, ValueError, RecursionError):
        return True


def _text(recipe: Recipe) -> str:
    return recipe.canonical_json() + "\n"


def planned(folder: RunFolder | None) -> list[Planned]:
    """Returns the phases that an unfinished run has planned; empty if it ended before that. Raises InputError."""
    if folder is None:
        return []
    try:
        plan = [Planned(**{**each, "skippable": tuple(each["skippable"])}) for each in folder.facts().get("plan", [])]
        if not all(isinstance(phase.rounds, int) for phase in plan):
            raise TypeError
        return plan
    except (TypeError, KeyError):
        raise _damaged(folder.path / "run.json", "has a plan that cannot be read") from None
