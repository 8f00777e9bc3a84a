"""Manages a party's run folders: opens the folder of a run and offers an unfinished run."""

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
    """The run folders of one party for one recipe, ``<out>/<run id>/<name>``.

    Args:
        facts: The facts to note in each new folder, such as ``job``.
        resume: The folder of an unfinished run, which the party offers to the server.
        checkpoint_every: The number of rounds between two checkpoints.
        logs: Whether the program's log is written into the folder.
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
            folder.checkpoints = make_store(folder, self.recipe)
        return folder

    def log(self, folder: RunFolder) -> None:
        """Writes this program's log into ``folder`` from now on."""
        if self.logs:
            log_to(folder.path / "log.jsonl", run=folder.run_id, party=self.name)

    def find_finished(self, run_id: str) -> RunFolder | None:
        """Returns the folder of a finished training run of the same recipe; None if this party has
        none.
        """
        return find_finished(self.out, run_id, self.name, self.recipe) if self._trains else None


def make_store(folder: RunFolder, recipe: Recipe) -> CheckpointStore:
    """Returns the store for the checkpoints of a run."""
    return CheckpointStore(folder.path / "checkpoints", recipe.run.kept_checkpoints)
