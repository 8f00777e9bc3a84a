"""A party's or the server's folder of one run: ``<out>/<run id>/<name>/``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import unwritable, write_atomic
from vfl_common.stages import Planned


class Store(Protocol):
    """Checkpoints of one party and run: a party's ``CheckpointStore``."""

    def save(self, label: str, tree: Any) -> object: ...
    def save_later(self, label: str, tree: Any) -> object: ...
    def flush(self) -> None: ...
    def load(self, label: str) -> Any: ...
    def labels(self) -> list[str]: ...
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
        """Adds facts to ``run.json``."""
        write_atomic(self.path / "run.json", json.dumps(self.facts() | facts, indent=1) + "\n")

    def facts(self) -> dict[str, Any]:
        path = self.path / "run.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}


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
        write_atomic(path / "recipe.json", recipe.canonical_json() + "\n")
        folder.note(run_id=run_id, recipe_digest=recipe.digest())
    except OSError as error:
        raise unwritable(path, error) from None
    return folder


def find_unfinished(out: Path, name: str, recipe: Recipe) -> RunFolder | None:
    """Finds the newest unfinished run of ``name`` under ``out`` with the same recipe."""
    digest = recipe.digest()
    found = []
    for path in out.glob(f"*/{name}/run.json"):
        try:
            facts = json.loads(path.read_text())
            if facts.get("recipe_digest") == digest and not facts.get("finished") and facts.get("job") == "train":
                found.append((path.stat().st_mtime_ns, path.parent))
        except (OSError, ValueError, AttributeError):
            continue  # not one of our runs
    if not found:
        return None
    path = max(found)[1]
    return RunFolder(path, path.parent.name)


def planned(folder: RunFolder | None) -> list[Planned]:
    """Returns the phases that an unfinished run has planned; empty if it ended before that."""
    facts = folder.facts().get("plan", []) if folder is not None else []
    return [Planned(**{**each, "skippable": tuple(each["skippable"])}) for each in facts]
