"""The state of each process (here, late or away), by the processes' logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from vfl_common.text import clean

EXPECTED, HERE, AWAITED, AWAY, LOST = "expected", "here", "awaited", "away", "lost"
FINISHED, FAILED, STOPPED, LEFT = "finished", "failed", "stopped", "left"
ENDED = "ended"
# The states in which a process must come back.
_AMISS = (LOST, AWAY, FAILED, STOPPED, ENDED)
# The maximum length of a reason, in characters.
_MAX_CHARS = 300
# {event: the status of the party that it names}
_ABOUT = {"joined": HERE, "back": HERE, "left": LEFT, "lost": LOST, "away": AWAY}
# {event: the status of the process that writes it}
_OWN = {
    "program": HERE,
    "ready": HERE,
    "completed": FINISHED,
    "failed": FAILED,
    "stopped": STOPPED,
}
# {event: the new state of the run}
_RUN = {
    "ready": "starting",
    "waiting": "waiting",
    "interrupted": "waiting",
    "started": "running",
    "completed": "finished",
}


@dataclass
class PersonStanding:
    """The state of one process. ``why``: the reported reason; ``since_s``: Unix time."""

    status: str = EXPECTED
    why: str = ""
    since_s: float = 0.0


@dataclass
class People:
    """All processes of a run, by name. ``run``: the state of the run, by the logs. ``server``: the
    server's name.
    """

    server: str = ""
    run: str = "starting"
    standings: dict[str, PersonStanding] = field(default_factory=dict)
    # The time of the run's state, and of the last report on each process.
    _run_s: float = 0.0
    _said_s: dict[str, float] = field(default_factory=dict)

    def expect(self, names: Iterable[str]) -> None:
        """Adds the names of the recipe."""
        for name in names:
            self.standings.setdefault(name, PersonStanding())

    def take(self, writer: str, line: Mapping[str, Any]) -> None:
        """Processes a line of a process's log; other events change nothing."""
        event, at_s = str(line.get("event", "")), time_of(line)
        if event in _OWN:
            why = line.get("message", "") if event == "failed" else ""
            self._set(writer, _OWN[event], at_s, why)
        if event in _ABOUT:
            self._set(str(line.get("party_", "")), _ABOUT[event], at_s, line.get("how", ""))
        if event in ("server_away", "server_back"):
            self._set(self.server, AWAY if event == "server_away" else HERE, at_s)
        if event == "waiting":
            self._wait(line.get("missing"), at_s)
        if event == "started":
            for name, standing in self.standings.items():
                if standing.status != AWAY:
                    self._set(name, HERE, at_s)
        # A process writes its early events late, when it has a folder.
        if event in _RUN and at_s >= self._run_s:
            self.run, self._run_s = _RUN[event], at_s

    def _wait(self, missing: Any, at_s: float) -> None:
        names = [str(name) for name in missing] if isinstance(missing, list) else []
        for name, standing in self.standings.items():
            if name in names and standing.status not in (*_AMISS, AWAITED):
                self._set(name, AWAITED, at_s)
            # The waiting process is here, and so are those for which it does not wait.
            elif name not in names and standing.status in (AWAITED, LOST):
                self._set(name, HERE, at_s)

    def _set(self, name: str, status: str, at_s: float, why: Any = "") -> None:
        # Names that are not in the recipe are ignored.
        if name in self.standings and at_s >= self._said_s.get(name, 0.0):
            self._said_s[name] = at_s
            before = self.standings[name]
            since_s = before.since_s if before.status == status else at_s
            self.standings[name] = PersonStanding(status, clean(str(why), _MAX_CHARS), since_s)


def time_of(line: Mapping[str, Any]) -> float:
    """Returns the time of a line of a log, in seconds since 1970; 0 if it has none."""
    try:
        return datetime.fromisoformat(str(line.get("time", ""))).timestamp()
    except (ValueError, OverflowError):
        return 0.0
