"""A party's folders of runs: it opens that of a run, and offers an unfinished one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl_common.config.recipe import Recipe
from vfl_common.process.logs import log_to
from vfl_common.run_folder import RunFolder, create, find_finished
from vfl_party.base.checkpoint import CheckpointStore


@dataclass
class Folders:
    """One party's folders of runs of one recipe, ``<out>/<run id>/<name>``.

    Args:
        facts: noted in each new folder; ``job`` is one of them.
        resume: the folder of an unfinished run, offered to the server.
        checkpoint_every: rounds between two checkpoints.
        logs: whether the program's log is kept in the folder.
    """

    out: Path
    name: str
    recipe: Recipe
    facts: Mapping[str, Any]
    resume: RunFolder | None = None
    checkpoint_every: int = 1
    logs: bool = True

    @property
    def _trains(self) -> bool:
        return bool(self.facts["job"] == "train")

    def open(self, run_id: str) -> RunFolder:
        """Opens the folder of the run that the server names. Raises InputError."""
        folder = create(self.out, run_id, self.name, self.recipe)
        folder.note(**self.facts)
        if self._trains:
            folder.checkpoints = store_of(folder, self.recipe)
        return folder

    def log(self, folder: RunFolder) -> None:
        """Appends this program's log to the folder's from now on."""
        if self.logs:
            log_to(folder.path / "log.jsonl", run=folder.run_id, party=self.name)

    def find_finished(self, run_id: str) -> RunFolder | None:
        """Returns the folder of a finished training run of the same recipe; None if it is not
        here.
        """
        return find_finished(self.out, run_id, self.name, self.recipe) if self._trains else None


def store_of(folder: RunFolder, recipe: Recipe) -> CheckpointStore:
    """Returns the checkpoints of a run in its folder."""
    return CheckpointStore(folder.path / "checkpoints", recipe.run.kept_checkpoints)
