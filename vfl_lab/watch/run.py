"""Follows the files of one run, for all processes whose folders are on this machine."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from vfl.summary.rounds import FILE, PartyFolder, RoundLine, parse_round
from vfl_common.bundle import Entry, read_entries
from vfl_common.errors import InputError
from vfl_common.files import GrowingFile
from vfl_common.process.logs import format_line
from vfl_common.run_folder import LOCK
from vfl_common.text import LINE, clean, shorten

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


EXPECTED, HERE, AWAITED, AWAY, LOST = "expected", "here", "awaited", "away", "lost"
FINISHED, FAILED, STOPPED, LEFT = "finished", "failed", "stopped", "left"
ENDED = "ended"
# The statuses of a process that is not running, which waiting does not change.
_ABSENT = (LOST, AWAY, FAILED, STOPPED, ENDED)
# The maximum number of characters of a reason.
_MAX_CHARS = 300
# {event: new status of the party that the event names}
_PARTY_STATUS = {"joined": HERE, "back": HERE, "left": LEFT, "lost": LOST, "away": AWAY}
# {event: new status of the process that logs the event}
_WRITER_STATUS = {
    "program": HERE,
    "ready": HERE,
    "completed": FINISHED,
    "failed": FAILED,
    "stopped": STOPPED,
}
# {event: new state of the run}
_RUN_STATE = {
    "ready": "starting",
    "waiting": "waiting",
    "interrupted": "waiting",
    "started": "running",
    "completed": "finished",
}


@dataclass
class ProcessStatus:
    """The status of one process.

    ``why`` is the reason in the log, and ``since_s`` the Unix time of the last change.
    """

    status: str = EXPECTED
    why: str = ""
    since_s: float = 0.0


@dataclass
class ProcessStatuses:
    """The statuses of all processes of a run.

    ``server`` is the name of the server, ``run`` the state of the run, and ``statuses`` maps the
    name of a process to its status.
    """

    server: str = ""
    run: str = "starting"
    statuses: dict[str, ProcessStatus] = field(default_factory=dict)
    # The times of the last events about the run, and about each process.
    _run_s: float = 0.0
    _last_event_s: dict[str, float] = field(default_factory=dict)

    def expect(self, names: Iterable[str]) -> None:
        """Adds processes that are expected to take part in the run."""
        for name in names:
            self.statuses.setdefault(name, ProcessStatus())

    def process_line(self, writer: str, line: Mapping[str, Any]) -> None:
        """Updates the statuses from a line of the log of ``writer``."""
        event, at_s = str(line.get("event", "")), get_time_s(line)
        if event in _WRITER_STATUS:
            why = line.get("message", "") if event == "failed" else ""
            self._set(writer, _WRITER_STATUS[event], at_s, why)
        if event in _PARTY_STATUS:
            self._set(str(line.get("party_", "")), _PARTY_STATUS[event], at_s, line.get("how", ""))
        if event in ("server_away", "server_back"):
            self._set(self.server, AWAY if event == "server_away" else HERE, at_s)
        if event == "waiting":
            self._wait(line.get("missing"), at_s)
        if event == "started":
            for name, process in self.statuses.items():
                if process.status != AWAY:
                    self._set(name, HERE, at_s)
        # Lines may be out of order: a process logs its first events only when it has a folder.
        if event in _RUN_STATE and at_s >= self._run_s:
            self.run, self._run_s = _RUN_STATE[event], at_s

    def _wait(self, missing: Any, at_s: float) -> None:
        names = [str(name) for name in missing] if isinstance(missing, list) else []
        for name, process in self.statuses.items():
            if name in names and process.status not in (*_ABSENT, AWAITED):
                self._set(name, AWAITED, at_s)
            # The waiting process, and all processes that it does not wait for, are here.
            elif name not in names and process.status in (AWAITED, LOST):
                self._set(name, HERE, at_s)

    def _set(self, name: str, status: str, at_s: float, why: Any = "") -> None:
        # A process that was not added by ``expect`` is ignored.
        if name in self.statuses and at_s >= self._last_event_s.get(name, 0.0):
            self._last_event_s[name] = at_s
            previous = self.statuses[name]
            since_s = previous.since_s if previous.status == status else at_s
            self.statuses[name] = ProcessStatus(status, clean(str(why), _MAX_CHARS), since_s)


def get_time_s(line: Mapping[str, Any]) -> float:
    """Returns the Unix time of a line of a log; 0 if the line has no time."""
    try:
        return datetime.fromisoformat(str(line.get("time", ""))).timestamp()
    except (ValueError, OverflowError):
        return 0.0


# The maximum number of points of a curve. If it is exceeded, every second point is removed.
MAX_POINTS = 1_000
# The maximum number of curves on a page. A run has a few curves for each party and phase.
MAX_CURVES = 500
# The maximum length of a name, in characters.
MAX_NAME = 80


class CurveKey(NamedTuple):
    """The party, phase, split and metric that identify a curve."""

    party: str
    phase: str
    split: str
    metric: str


class Point(NamedTuple):
    """A point of a curve.

    ``version`` is the number of the reading in which the point was new.
    """

    version: int
    round: int
    value: float


@dataclass
class Curve:
    """The values of one metric by round.

    ``whole_since``: The number of a reading. A page that is older needs all points again.
    """

    whole_since: int
    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    # The number of rounds from one point to the next.
    _stride: int = 1

    def add(self, version: int, round_: int, value: float) -> None:
        """Adds the value of a round. A repeated round replaces this round and all later rounds."""
        if self.last is not None and round_ <= self.last.round:
            self.points = [point for point in self.points if point.round < round_]
            self.whole_since = version
        self.last = Point(version, round_, value)
        if round_ % self._stride == 0 or not self.points:
            self.points.append(self.last)
        if len(self.points) > MAX_POINTS:
            self._stride *= 2
            first_point = self.points[0]
            later_points = [p for p in self.points[1:] if p.round % self._stride == 0]
            self.points, self.whole_since = [first_point, *later_points], version

    def get_changes(self, version: int) -> dict[str, Any] | None:
        """Returns the changes since ``version`` for a page; None if there are no changes."""
        if self.last is None or self.last.version <= version:
            return None
        whole = self.whole_since > version
        points = self.points if whole else _select_new_points(self.points, version)
        return {
            "whole": whole,
            "points": [[point.round, point.value] for point in points],
            "last": [self.last.round, self.last.value],
        }


def _select_new_points(points: list[Point], version: int) -> list[Point]:
    """Returns the points at the end of the list that are newer than ``version``."""
    start = len(points)
    while start and points[start - 1].version > version:
        start -= 1
    return points[start:]


@dataclass
class Curves:
    """All curves of a run."""

    by_key: dict[CurveKey, Curve] = field(default_factory=dict)

    def add_line(self, version: int, party: str, line: RoundLine) -> None:
        """Adds the metrics of a round, from a line of a party's ``metrics.jsonl``."""
        for split, named in line.metrics.items():
            for metric, value in named.items():
                texts = (clean(text, MAX_NAME) for text in (line.phase, split, metric))
                key = CurveKey(party, *texts)
                if key not in self.by_key:
                    if len(self.by_key) >= MAX_CURVES:
                        continue
                    self.by_key[key] = Curve(version)
                self.by_key[key].add(version, line.round, value)

    def remove_party(self, party: str) -> None:
        """Removes all curves of a party."""
        self.by_key = {key: curve for key, curve in self.by_key.items() if key.party != party}

    def get_changes(self, version: int) -> list[dict[str, Any]]:
        """Returns the changes of all curves since ``version``, for a page."""
        changes = ((key, curve.get_changes(version)) for key, curve in self.by_key.items())
        return [key._asdict() | change for key, change in changes if change is not None]


# The maximum number of log lines on a page.
MAX_LINES = 300
# The maximum numbers of processes and of links on a page.
MAX_PROCESSES = 200
MAX_LINKS = 400
# A dead process is shown as ended if it has not written a file for this long.
_SILENT_S = 5.0
# Events that the page does not list in the log, because its progress shows them.
_PROGRESS_EVENTS = frozenset({"round", "progress", "trained"})
# The statuses of a process that is not running.
_NOT_RUNNING = (FINISHED, FAILED, STOPPED, LEFT, LOST, AWAY, ENDED)


@dataclass
class RunFollower:
    """Reads the files of one run, and keeps its curves, statuses and log.

    ``log`` has the last lines of all logs, each with the number of the reading that found it.
    """

    folder: Path
    processes: dict[str, ProcessFiles] = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    statuses: ProcessStatuses = field(default_factory=ProcessStatuses)
    log: deque[tuple[int, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    recipe: dict[str, Any] = field(default_factory=dict)
    # {party: {phase: (number of finished rounds, planned number)}}
    _rounds: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    # {party: (sent bytes, received bytes)}
    _bytes: dict[str, tuple[float, float]] = field(default_factory=dict)

    def is_replaced(self) -> bool:
        """Returns whether files of the run were removed or replaced."""
        return any(process.is_replaced() for process in self.processes.values())

    def read(self, version: int) -> bool:
        """Reads the new lines of all processes. Returns whether there are new lines.

        ``version`` is the number of this reading.
        """
        folders = sorted(path.parent for path in self.folder.glob("*/run.json"))
        for folder in folders[:MAX_PROCESSES]:
            self.processes.setdefault(folder.name, ProcessFiles(folder))
        self._read_recipe()
        lines, rounds = [], 0
        for name, process in self.processes.items():
            new_lines = process.read()
            lines += [(get_time_s(line), name, line) for line in new_lines.log]
            rounds += len(new_lines.rounds)
            for row in new_lines.rounds:
                self.curves.add_line(version, name, row)
                phase = clean(row.phase, MAX_NAME)
                self._rounds.setdefault(name, {})[phase] = (row.round, row.rounds)
                self._steps[name] = row.steps
                self._bytes[name] = (row.values["bytes/sent"], row.values["bytes/received"])
        # The logs of all processes are merged by time.
        for _, name, line in sorted(lines, key=lambda entry: entry[0]):
            self.statuses.process_line(name, line)
            if line.get("event") not in _PROGRESS_EVENTS:
                self.log.append((version, _format_log_line(name, line)))
        return bool(lines or rounds)

    def _read_recipe(self) -> None:
        """Reads the recipe from the first process that has a copy, until it is found."""
        if self.recipe:
            self.statuses.expect(self.processes)
            return
        copies = (PartyFolder(p.folder).read("recipe.json") for p in self.processes.values())
        self.recipe = next((copy for copy in copies if copy), {})
        self.statuses.server = str(self.recipe.get("server", ""))
        self.statuses.expect(name for name in self._get_roles() if name)

    def _get_roles(self) -> dict[str, str]:
        """Returns {name of a process: role}, the server first."""
        roles = {self.statuses.server: "server"} if self.statuses.server else {}
        parties = self.recipe.get("parties")
        for party in parties if isinstance(parties, list) else ():
            if isinstance(party, dict) and isinstance(party.get("name"), str):
                roles[party["name"]] = clean(str(party.get("role", "")), MAX_NAME)
        for name in self.processes:
            roles.setdefault(name, "")
        return dict(list(roles.items())[:MAX_PROCESSES])

    def make_state(self) -> dict[str, Any]:
        """Returns the state of the run as JSON values, without curves and log."""
        now_s = time.time()
        processes = [
            self._describe_process(name, role, now_s) for name, role in self._get_roles().items()
        ]
        state, why = self._find_run_state(processes)
        return {
            "run": clean(self.folder.name, MAX_NAME),
            "recipe": clean(str(self.recipe.get("name", "")), MAX_NAME),
            "state": state,
            "why": why,
            "phases": self._describe_phases(),
            "left_s": self._estimate_left_s(now_s) if state == "running" else None,
            "processes": processes,
            "links": self._describe_links(),
        }

    def _find_run_state(self, processes: list[dict[str, Any]]) -> tuple[str, str]:
        local_processes = self.processes.values()
        for process in local_processes:
            aside = process.facts.get("set_aside")
            if isinstance(aside, dict):
                return "set aside", clean(str(aside.get("why", "")), LINE)
        if local_processes and all(process.facts.get("finished") for process in local_processes):
            return FINISHED, ""
        for status in (FAILED, STOPPED, ENDED):
            failed = [process for process in processes if process["status"] == status]
            # A process that stopped because of another process does not know the cause.
            failed.sort(key=lambda process: "stopped" in process["why"])
            if failed and all(p["status"] in _NOT_RUNNING for p in processes if p["here"]):
                return (FAILED if status == ENDED else status), failed[0]["why"]
        return self.statuses.run, ""

    def _describe_process(self, name: str, role: str, now_s: float) -> dict[str, Any]:
        process_status = self.statuses.statuses.get(name)
        status, why = (
            (process_status.status, process_status.why) if process_status else (EXPECTED, "")
        )
        since_s = process_status.since_s if process_status else 0.0
        process = self.processes.get(name)
        rates: Mapping[str, float] = {}
        if process is not None:
            # While a process waits, the rates of its last rounds do not apply.
            rates = process.compute_rates() if status == HERE else {}
            if process.facts.get("finished"):
                status, why = FINISHED, ""
            elif (
                status not in _NOT_RUNNING
                and now_s - process.last_s > _SILENT_S
                and process.is_dead()
            ):
                status, why = ENDED, "its process has ended without logging a reason"
        sent, received = self._bytes.get(name, (None, None))
        return {
            "name": clean(shorten(name), MAX_NAME + 1),
            "role": role,
            "here": process is not None,
            "status": status,
            "why": why,
            "since_s": since_s or None,
            "last_s": process.last_s if process is not None else None,
            "steps": self._steps.get(name),
            "sent": sent,
            "received": received,
            "rates": rates,
        }

    def _count_rounds(self) -> dict[str, int]:
        """Returns {phase: planned number of rounds} in recipe order; 0 if the number is unknown."""
        planned: dict[str, int] = {}
        phases = self.recipe.get("phases")
        plans = [process.facts.get("plan") for process in self.processes.values()]
        for plan in [phases, *plans]:
            for phase in plan if isinstance(plan, list) else ():
                if isinstance(phase, dict) and isinstance(phase.get("name"), str):
                    rounds = phase.get("rounds")
                    name = clean(phase["name"], MAX_NAME)
                    planned[name] = rounds if isinstance(rounds, int) else planned.get(name, 0)
        return planned

    def _describe_phases(self) -> list[dict[str, Any]]:
        """Returns the phases in order, each with the number of rounds that all parties in the phase
        have finished.
        """
        planned = self._count_rounds()
        phases = []
        for phase in dict.fromkeys(
            [*planned, *(name for done in self._rounds.values() for name in done)]
        ):
            counts = [done[phase] for done in self._rounds.values() if phase in done]
            rounds = max((total for _, total in counts), default=0) or planned.get(phase, 0)
            finished = min((done for done, _ in counts), default=0)
            phases.append({"name": phase, "done": finished, "rounds": rounds})
        return phases

    def _estimate_left_s(self, now_s: float) -> float | None:
        """Estimates the remaining seconds of the current phase from the rate of its last rounds.
        None if the rate is unknown.
        """
        estimates_s = []
        for process in self.processes.values():
            rate = process.compute_rates().get("rounds", 0.0)
            last = process.last_rounds[-1] if process.last_rounds else None
            if last is not None and rate > 0 and last.rounds > last.round:
                estimates_s.append((last.rounds - last.round) / rate - (now_s - last.time_s))
        return max(0.0, *estimates_s) if estimates_s else None

    def _describe_links(self) -> list[dict[str, Any]]:
        """Returns the bytes of each link, as its sender or otherwise its receiver counted them."""
        links: dict[Link, tuple[int, float | None]] = {}
        for process in self.processes.values():
            rates = process.compute_link_rates()
            for link, count in process.links[1].items():
                if link not in links or link[0] == process.name:
                    links[link] = (count, rates.get(link))
        largest = sorted(links.items(), key=lambda item: -item[1][0])[:MAX_LINKS]
        return [
            {
                "from": clean(shorten(link[0]), MAX_NAME + 1),
                "to": clean(shorten(link[1]), MAX_NAME + 1),
                "bytes": count,
                "rate": rate,
            }
            for link, (count, rate) in sorted(largest)
        ]


def _format_log_line(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a line of a log to the format of the page."""
    return {
        "at_s": get_time_s(line),
        "party": clean(shorten(name), MAX_NAME + 1),
        "level": clean(str(line.get("level", "")), MAX_NAME),
        "text": clean(format_line(line), LINE),
    }
