"""What one process of a run has written since it was read last."""

from __future__ import annotations

import json
import os
import re
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.report.rounds import FILE, RoundLine, Source, parse
from vfl_common.errors import InputError
from vfl_common.files import Growing
from vfl_common.ledger import Entry, read_entries
from vfl_common.run_folder import LOCK

# Of a log that is there already, the last bytes that are read.
_MOST_LOG = 1_000_000
# Rounds that a pace is taken from.
_PACE = 30
_FILES = ("run.json", FILE, "log.jsonl", "ledger.json")
_HOLDER = re.compile(r"process (\d+) on (\S+), since ")
Link = tuple[str, str]


@dataclass
class News:
    """What is new: lines of the log, and of the rounds."""

    log: list[dict[str, Any]]
    rounds: list[RoundLine]


@dataclass
class Watched:
    """A process's folder of a run.

    ``last_s``: when it wrote last, Unix time. ``facts``: its ``run.json``. ``links``: {(sender,
    receiver): message bytes}, and ``links_before``: as they were when the ledger was written
    before, each with its time. ``lately``: its last rounds.
    """

    folder: Path
    last_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    links: tuple[float, dict[Link, int]] = (0.0, {})
    links_before: tuple[float, dict[Link, int]] = (0.0, {})
    lately: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=_PACE))
    _stamps: dict[str, int] = field(default_factory=dict)
    _files: dict[str, Growing] = field(init=False)

    def __post_init__(self) -> None:
        log, rounds = self.folder / "log.jsonl", self.folder / FILE
        self._files = {"log": Growing(log, _MOST_LOG), "rounds": Growing(rounds)}
        self._identity = self._who()

    @property
    def name(self) -> str:
        return self.folder.name

    def replaced(self) -> bool:
        """Whether the files are no longer those that were read: the folder was removed, or made
        anew, or another run's was put in its place.
        """
        return self._who() != self._identity or any(
            each.replaced() for each in self._files.values()
        )

    def _who(self) -> tuple[Any, ...]:
        facts = Source(self.folder).read("run.json")
        try:
            inode = self.folder.stat().st_ino
        except OSError:
            return ()
        return inode, facts.get("run_id"), facts.get("recipe_digest")

    def read(self) -> News:
        """Reads what is new. A file that is missing or damaged has nothing new."""
        log = [line for line in map(_object, self._lines("log")) if line]
        rounds = [found for line in self._lines("rounds") if (found := parse(line, self.last_s))]
        self._keep_pace(rounds)
        for name in _FILES:
            self._look(name)
        return News(log, rounds)

    def _keep_pace(self, rounds: Iterable[RoundLine]) -> None:
        for each in rounds:
            if self.lately and each.generation != self.lately[-1].generation:
                # Between two generations nobody worked.
                self.lately.clear()
            self.lately.append(each)

    def _lines(self, name: str) -> list[bytes]:
        try:
            return [line for data, _ in self._files[name].new() for line in data.splitlines()]
        except OSError:
            return []

    def _look(self, name: str) -> None:
        """Notes when a file was written, and reads it if it is one of those that are replaced."""
        path = self.folder / name
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return
        self.last_s = max(self.last_s, stamp / 1e9)
        # The end of a run is noted in the file's memory, which may leave its time.
        if name == "run.json":
            self.facts = Source(self.folder).read(name)
        if name == "ledger.json" and self._stamps.get(name) != stamp:
            self._count(path, stamp / 1e9)
        self._stamps[name] = stamp

    def _count(self, path: Path, at_s: float) -> None:
        try:
            entries = read_entries(path)
        except InputError:
            return
        self.links_before, self.links = self.links, (at_s, _sums(self.name, entries))

    def link_rates(self) -> dict[Link, float]:
        """Returns {(sender, receiver): bytes a second} between the last two ledgers."""
        (then_s, then), (now_s, now) = self.links_before, self.links
        if not then_s or now_s <= then_s:
            return {}
        return {
            link: max(0, count - then.get(link, 0)) / (now_s - then_s)
            for link, count in now.items()
        }

    def rates(self) -> dict[str, float]:
        """Returns what a second brings, in the last rounds: ``steps``, ``sent`` and ``received``
        bytes, ``rounds`` of the phase. Empty with fewer than two rounds.
        """
        if not self.lately:
            return {}
        last = self.lately[-1]
        first = next(each for each in self.lately if each.phase == last.phase)
        seconds = last.time_s - first.time_s
        if seconds <= 0:
            return {}
        sums = {
            "steps": last.steps - first.steps,
            "rounds": last.round - first.round,
            "sent": last.values["bytes/sent"] - first.values["bytes/sent"],
            "received": last.values["bytes/received"] - first.values["bytes/received"],
        }
        return {name: max(0.0, value / seconds) for name, value in sums.items()}

    def dead(self) -> bool:
        """Whether the process that has the folder's lock was of this machine, and is gone."""
        try:
            found = _HOLDER.match((self.folder / LOCK).read_text(errors="replace"))
            if found is None or found[2] != socket.gethostname():
                return False
            os.kill(int(found[1]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            return False
        return False


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sums(name: str, entries: Iterable[Entry]) -> dict[Link, int]:
    found: dict[Link, int] = {}
    for each in entries:
        link = (name, each.peer) if each.direction == "sent" else (each.peer, name)
        found[link] = found.get(link, 0) + each.message_bytes
    return found
