"""Reads the new content of one process's files."""

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

from vfl.report.rounds import FILE, PartyFolder, RoundLine, parse
from vfl_common.errors import InputError
from vfl_common.files import GrowingFile
from vfl_common.ledger import Entry, read_entries
from vfl_common.run_folder import LOCK

# The number of last bytes to read of an existing log.
_MAX_LOG = 1_000_000
# The number of rounds for a pace.
_PACE = 30
_FILES = ("run.json", FILE, "log.jsonl", "ledger.json")
_HOLDER = re.compile(r"process (\d+) on (\S+), since ")
Link = tuple[str, str]


@dataclass
class News:
    """New lines of the log, and of the rounds."""

    log: list[dict[str, Any]]
    rounds: list[RoundLine]


@dataclass
class Watched:
    """A process's folder of a run.

    ``last_s``: the Unix time of its last write. ``facts``: its ``run.json``. ``links``: {(sender,
    receiver): message bytes}, and ``links_before``: those of the previous ledger, each with its
    time. ``lately``: its last rounds.
    """

    folder: Path
    last_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    links: tuple[float, dict[Link, int]] = (0.0, {})
    links_before: tuple[float, dict[Link, int]] = (0.0, {})
    lately: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=_PACE))
    _stamps: dict[str, int] = field(default_factory=dict)
    _files: dict[str, GrowingFile] = field(init=False)

    def __post_init__(self) -> None:
        log, rounds = self.folder / "log.jsonl", self.folder / FILE
        self._files = {"log": GrowingFile(log, _MAX_LOG), "rounds": GrowingFile(rounds)}
        self._identity = self._who()

    @property
    def name(self) -> str:
        """The process's name."""
        return self.folder.name

    def is_replaced(self) -> bool:
        """Returns whether the files were removed or replaced since they were read."""
        return self._who() != self._identity or any(
            file.was_replaced() for file in self._files.values()
        )

    def _who(self) -> tuple[Any, ...]:
        facts = PartyFolder(self.folder).read("run.json")
        try:
            inode = self.folder.stat().st_ino
        except OSError:
            return ()
        return inode, facts.get("run_id"), facts.get("recipe_digest")

    def read(self) -> News:
        """Reads new lines. A missing or damaged file has none."""
        log = [line for line in map(_object, self._lines("log")) if line]
        rounds = [row for line in self._lines("rounds") if (row := parse(line, self.last_s))]
        self._keep_pace(rounds)
        for name in _FILES:
            self._look(name)
        return News(log, rounds)

    def _keep_pace(self, rounds: Iterable[RoundLine]) -> None:
        for row in rounds:
            if self.lately and row.generation != self.lately[-1].generation:
                # The time between two generations is not part of the pace.
                self.lately.clear()
            self.lately.append(row)

    def _lines(self, name: str) -> list[bytes]:
        try:
            return [line for data, _ in self._files[name].new() for line in data.splitlines()]
        except OSError:
            return []

    def _look(self, name: str) -> None:
        """Updates the time of the last write, and reads a file that is replaced as a whole."""
        path = self.folder / name
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return
        self.last_s = max(self.last_s, stamp / 1e9)
        # The end of a run is written through a memory map, which may not change the file's time.
        if name == "run.json":
            self.facts = PartyFolder(self.folder).read(name)
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
        """Returns the rates of the last rounds, per second: ``steps``, ``sent`` and ``received``
        bytes, ``rounds`` of the phase. Empty with fewer than two rounds.
        """
        if not self.lately:
            return {}
        last = self.lately[-1]
        first = next(row for row in self.lately if row.phase == last.phase)
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
        """Returns whether the process with the folder's lock was on this machine, and is gone."""
        try:
            holder = _HOLDER.match((self.folder / LOCK).read_text(errors="replace"))
            if holder is None or holder[2] != socket.gethostname():
                return False
            os.kill(int(holder[1]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except OSError:
            return False
        return False


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _sums(name: str, entries: Iterable[Entry]) -> dict[Link, int]:
    sums: dict[Link, int] = {}
    for entry in entries:
        link = (name, entry.peer) if entry.direction == "sent" else (entry.peer, name)
        sums[link] = sums.get(link, 0) + entry.message_bytes
    return sums
