"""Reads the state of a run for all pages of ``vfl watch``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.summary.reading import find_run_folder
from vfl_common.production.registry import make_sort_key
from vfl_common.text import to_json
from vfl_lab.watch.run import RunFollower


@dataclass
class Picture:
    """The current state of a run, for all viewers. Not thread-safe.

    ``path`` is the folder of a run, the folder of a process in it, or a folder of runs, whose
    newest run is shown. Each reading looks for the run again, because it may begin, vanish or be
    replaced. ``version`` is the number of the last reading that found a change.
    """

    path: Path
    version: int = 0
    _run: RunFollower | None = None
    _state: dict[str, Any] = field(default_factory=dict)
    # The version in which the current run was shown first.
    _begun: int = 0
    _messages: dict[int, str] = field(default_factory=dict)

    def read(self) -> None:
        """Reads the changes of the run's files."""
        version = self.version + 1
        folder = find_run(self.path)
        run = self._run
        if run is not None and (folder != run.folder or run.is_replaced()):
            run = None
        if run is None and folder is not None:
            run = RunFollower(folder)
        is_replaced = run is not self._run
        has_new_lines = run is not None and run.read(version)
        state = run.make_state() if run is not None else self._make_missing_state()
        if not (is_replaced or has_new_lines or state != self._state):
            return
        self._begun = version if is_replaced else self._begun
        self.version, self._run, self._state = version, run, state
        self._messages.clear()

    def _make_missing_state(self) -> dict[str, Any]:
        reason = "there is no run yet" if self.path.is_dir() else "the folder does not exist"
        return {"state": "none", "why": f"{reason}; this page waits for one"}

    def get_changes(self, version: int) -> str:
        """Returns the changes since ``version`` as JSON, for a page. For a new page, with version
        0, this is the whole state.
        """
        if version not in self._messages:
            self._messages[version] = to_json(self._collect_changes(version), compact=True)
        return self._messages[version]

    def _collect_changes(self, version: int) -> dict[str, Any]:
        is_whole = version < self._begun or version == 0
        since = 0 if is_whole else version
        run, changes = self._run, {"version": self.version, "anew": is_whole, "state": self._state}
        if run is None:
            return changes
        log = [line for line_version, line in run.log if line_version > since]
        return changes | {"curves": run.curves.get_changes(since), "log": log}


def find_run(path: Path) -> Path | None:
    """Returns the folder of the run to show for ``path``; None if there is no run yet."""
    if any(path.glob("*/run.json")):
        return path
    if (path / "run.json").is_file():
        return find_run_folder(path)
    try:
        with os.scandir(path) as entries:
            folders = [
                (make_sort_key(entry.name, entry.stat().st_mtime), Path(entry.path))
                for entry in entries
                if entry.is_dir() and not entry.name.startswith(".")
            ]
    except OSError:
        return None
    folders.sort(reverse=True)
    return next((folder for _, folder in folders if any(folder.glob("*/run.json"))), None)
