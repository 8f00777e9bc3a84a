"""Derives the status of each process of a run (such as here, awaited or lost) from the logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from vfl_common.text import clean

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
