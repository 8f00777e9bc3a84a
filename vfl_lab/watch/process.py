"""Reads new lines from the files of one process of a run."""

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

from vfl.summary.rounds import FILE, PartyFolder, RoundLine, parse_round
from vfl_common.bundle import Entry, read_entries
from vfl_common.errors import InputError
from vfl_common.files import GrowingFile
from vfl_common.run_folder import LOCK

# The maximum number of bytes to read from the end of a log that exists at the start.
_MAX_LOG = 1_000_000
# The number of last rounds from which rates are computed.
_RATE_ROUNDS = 30
_FILES = ("run.json", FILE, "log.jsonl", "ledger.json")
_HOLDER = re.compile(r"process (\d+) on (\S+), since ")
Link = tuple[str, str]


@dataclass
class NewLines:
    """New lines of the log, and new rounds, since the last reading."""

    log: list[dict[str, Any]]
    rounds: list[RoundLine]


@dataclass
class ProcessFiles:
    """The files of one process, in its folder of a run.

    Args:
        folder: The folder of the process.
        last_s: The Unix time of the last write to a file.
        facts: The content of ``run.json``.
        links: The time of the ledger, and {(sender, receiver): message bytes}.
        links_before: The same for the previous version of the ledger.
        last_rounds: The last rounds, from which rates are computed.
    """

    folder: Path
    last_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    links: tuple[float, dict[Link, int]] = (0.0, {})
    links_before: tuple[float, dict[Link, int]] = (0.0, {})
    last_rounds: deque[RoundLine] = field(default_factory=lambda: deque(maxlen=_RATE_ROUNDS))
    _stamps: dict[str, int] = field(default_factory=dict)
    _files: dict[str, GrowingFile] = field(init=False)

    def __post_init__(self) -> None:
        log, rounds = self.folder / "log.jsonl", self.folder / FILE
        self._files = {"log": GrowingFile(log, _MAX_LOG), "rounds": GrowingFile(rounds)}
        self._identity = self._get_identity()

    @property
    def name(self) -> str:
        """The name of the process."""
        return self.folder.name

    def is_replaced(self) -> bool:
        """Returns whether the files were removed or replaced since the first reading."""
        return self._get_identity() != self._identity or any(
            file.was_replaced() for file in self._files.values()
        )

    def _get_identity(self) -> tuple[Any, ...]:
        facts = PartyFolder(self.folder).read("run.json")
        try:
            inode = self.folder.stat().st_ino
        except OSError:
            return ()
        return inode, facts.get("run_id"), facts.get("recipe_digest")

    def read(self) -> NewLines:
        """Reads the new lines of all files. Missing or damaged files are ignored."""
        log = [line for line in map(_parse_object, self._read_lines("log")) if line]
        rounds = [
            row for line in self._read_lines("rounds") if (row := parse_round(line, self.last_s))
        ]
        self._keep_last_rounds(rounds)
        for name in _FILES:
            self._check_file(name)
        return NewLines(log, rounds)

    def _keep_last_rounds(self, rounds: Iterable[RoundLine]) -> None:
        for row in rounds:
            if self.last_rounds and row.generation != self.last_rounds[-1].generation:
                # The pause between two generations would distort the rates.
                self.last_rounds.clear()
            self.last_rounds.append(row)

    def _read_lines(self, name: str) -> list[bytes]:
        try:
            return [line for data, _ in self._files[name].new() for line in data.splitlines()]
        except OSError:
            return []

    def _check_file(self, name: str) -> None:
        """Updates the time of the last write, and reads ``run.json`` or ``ledger.json`` again."""
        path = self.folder / name
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return
        self.last_s = max(self.last_s, stamp / 1e9)
        # This file is read even if its time is unchanged, because a memory map may have changed it.
        if name == "run.json":
            self.facts = PartyFolder(self.folder).read(name)
        if name == "ledger.json" and self._stamps.get(name) != stamp:
            self._read_ledger(path, stamp / 1e9)
        self._stamps[name] = stamp

    def _read_ledger(self, path: Path, at_s: float) -> None:
        try:
            entries = read_entries(path)
        except InputError:
            return
        self.links_before, self.links = self.links, (at_s, _sum_by_link(self.name, entries))

    def compute_link_rates(self) -> dict[Link, float]:
        """Returns {(sender, receiver): bytes per second} between the last two ledgers."""
        (previous_s, previous), (current_s, current) = self.links_before, self.links
        if not previous_s or current_s <= previous_s:
            return {}
        return {
            link: max(0, count - previous.get(link, 0)) / (current_s - previous_s)
            for link, count in current.items()
        }

    def compute_rates(self) -> dict[str, float]:
        """Returns the rates in the last rounds, per second: ``steps``, ``rounds``, and ``sent`` and
        ``received`` bytes. Empty with fewer than two rounds of the phase.
        """
        if not self.last_rounds:
            return {}
        last = self.last_rounds[-1]
        first = next(row for row in self.last_rounds if row.phase == last.phase)
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

    def is_dead(self) -> bool:
        """Returns whether the folder's process was on this machine and has ended."""
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


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _sum_by_link(name: str, entries: Iterable[Entry]) -> dict[Link, int]:
    sums: dict[Link, int] = {}
    for entry in entries:
        link = (name, entry.peer) if entry.direction == "sent" else (entry.peer, name)
        sums[link] = sums.get(link, 0) + entry.message_bytes
    return sums
