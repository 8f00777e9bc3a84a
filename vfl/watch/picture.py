"""The content of all pages of a watch: one reader for any number of viewers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.report.reading import of_run
from vfl.watch.run import RunFollower
from vfl_common.production.registry import when_began
from vfl_common.text import to_json


@dataclass
class Picture:
    """The run in ``path``: a run's folder, a process's folder in it, or a folder of runs, for the
    newest. Each reading looks again: a run may come, go and be replaced.

    ``version``: the number of the last reading that found something new. Not thread-safe.
    """

    path: Path
    version: int = 0
    _run: RunFollower | None = None
    _state: dict[str, Any] = field(default_factory=dict)
    # The reading at which the run was replaced.
    _begun: int = 0
    _said: dict[int, str] = field(default_factory=dict)

    def read(self) -> None:
        """Reads what is new."""
        version = self.version + 1
        folder = run_in(self.path)
        run = self._run
        if run is not None and (folder != run.folder or run.is_replaced()):
            run = None
        if run is None and folder is not None:
            run = RunFollower(folder)
        another = run is not self._run
        grown = run is not None and run.read(version)
        state = run.state() if run is not None else self._none()
        if not (another or grown or state != self._state):
            return
        self._begun = version if another else self._begun
        self.version, self._run, self._state = version, run, state
        self._said.clear()

    def _none(self) -> dict[str, Any]:
        there = "there is no run yet" if self.path.is_dir() else "the folder does not exist"
        return {"state": "none", "why": f"{there}; this page waits for one"}

    def since(self, version: int) -> str:
        """Returns, as JSON, the news for a page of version ``version`` (0: a new page). The text is
        the same for all pages of a version.
        """
        if version not in self._said:
            self._said[version] = to_json(self._news(version), compact=True)
        return self._said[version]

    def _news(self, version: int) -> dict[str, Any]:
        is_whole = version < self._begun or version == 0
        known = 0 if is_whole else version
        run, news = self._run, {"version": self.version, "anew": is_whole, "state": self._state}
        if run is None:
            return news
        log = [line for at, line in run.log if at > known]
        return news | {"curves": run.curves.since(known), "log": log}


def run_in(path: Path) -> Path | None:
    """Returns the run's folder for ``path``; None if there is none now."""
    if any(path.glob("*/run.json")):
        return path
    if (path / "run.json").is_file():
        return of_run(path)
    try:
        with os.scandir(path) as entries:
            folders = [
                (when_began(entry.name, entry.stat().st_mtime), Path(entry.path))
                for entry in entries
                if entry.is_dir() and not entry.name.startswith(".")
            ]
    except OSError:
        return None
    folders.sort(reverse=True)
    return next((folder for _, folder in folders if any(folder.glob("*/run.json"))), None)
