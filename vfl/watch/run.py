"""Follows the files of one run, of all processes with folders here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.report.rounds import PartyFolder
from vfl.watch.curves import MAX_NAME, Curves
from vfl.watch.people import (
    AWAY,
    ENDED,
    EXPECTED,
    FAILED,
    FINISHED,
    HERE,
    LEFT,
    LOST,
    STOPPED,
    People,
    time_of,
)
from vfl.watch.process import Link, Watched
from vfl_common.process.logs import line_text
from vfl_common.text import LINE, clean, shorten

# The maximum number of lines of the log on a page.
MAX_LINES = 300
# The maximum numbers of processes, and of links between them, on a page.
MAX_PROCESSES = 200
MAX_LINKS = 400
# The time without writes after which a dead process has ended.
_SILENT_S = 5.0
# Events that the progress shows already.
_SHOWN = frozenset({"round", "progress", "trained"})
_OVER = (FINISHED, FAILED, STOPPED, LEFT, LOST, AWAY, ENDED)


@dataclass
class RunFollower:
    """One run: ``state()`` has everything but the curves and the log, which grow.

    ``log``: (reading, line) of the last lines.
    """

    folder: Path
    processes: dict[str, Watched] = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    people: People = field(default_factory=People)
    log: deque[tuple[int, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    recipe: dict[str, Any] = field(default_factory=dict)
    # {party: {phase: (rounds done, planned)}}
    _done: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    _aside: str = ""

    def is_replaced(self) -> bool:
        """Returns whether the run's files are gone or replaced."""
        return any(process.is_replaced() for process in self.processes.values())

    def read(self, version: int) -> bool:
        """Reads new lines in all folders; ``version``: the number of this reading. Returns whether
        there are new lines.
        """
        folders = sorted(path.parent for path in self.folder.glob("*/run.json"))
        for folder in folders[:MAX_PROCESSES]:
            self.processes.setdefault(folder.name, Watched(folder))
        self._read_recipe()
        lines, rounds = [], 0
        for name, process in self.processes.items():
            news = process.read()
            lines += [(time_of(line), name, line) for line in news.log]
            rounds += len(news.rounds)
            for row in news.rounds:
                self.curves.take(version, name, row)
                phase = clean(row.phase, MAX_NAME)
                self._done.setdefault(name, {})[phase] = (row.round, row.rounds)
                self._steps[name] = row.steps
                self._sums[name] = (row.values["bytes/sent"], row.values["bytes/received"])
        # The lines of all processes, in the order of their times.
        for _, name, line in sorted(lines, key=lambda entry: entry[0]):
            self.people.take(name, line)
            if line.get("event") not in _SHOWN:
                self.log.append((version, _log_line(name, line)))
        return bool(lines or rounds)

    def _read_recipe(self) -> None:
        """Reads the recipe once, from the first process that has a copy."""
        if self.recipe:
            self.people.expect(self.processes)
            return
        copies = (PartyFolder(p.folder).read("recipe.json") for p in self.processes.values())
        self.recipe = next((copy for copy in copies if copy), {})
        self.people.server = str(self.recipe.get("server", ""))
        self.people.expect(name for name in self._roster() if name)

    def _roster(self) -> dict[str, str]:
        """Returns {name: role}, the server first."""
        roles = {self.people.server: "server"} if self.people.server else {}
        parties = self.recipe.get("parties")
        for party in parties if isinstance(parties, list) else ():
            if isinstance(party, dict) and isinstance(party.get("name"), str):
                roles[party["name"]] = clean(str(party.get("role", "")), MAX_NAME)
        for name in self.processes:
            roles.setdefault(name, "")
        return dict(list(roles.items())[:MAX_PROCESSES])

    def state(self) -> dict[str, Any]:
        """Returns the page's state, without curves and log."""
        now_s = time.time()
        processes = [self._process(name, role, now_s) for name, role in self._roster().items()]
        state, why = self._run_state(processes)
        return {
            "run": clean(self.folder.name, MAX_NAME),
            "recipe": clean(str(self.recipe.get("name", "")), MAX_NAME),
            "state": state,
            "why": why,
            "phases": self._phases(),
            "left_s": self._estimate_left_s(now_s) if state == "running" else None,
            "processes": processes,
            "links": self._links(),
        }

    def _run_state(self, processes: list[dict[str, Any]]) -> tuple[str, str]:
        here = self.processes.values()
        for process in here:
            aside = process.facts.get("set_aside")
            if isinstance(aside, dict):
                return "set aside", clean(str(aside.get("why", "")), LINE)
        if here and all(process.facts.get("finished") for process in here):
            return FINISHED, ""
        for status in (FAILED, STOPPED, ENDED):
            failed = [process for process in processes if process["status"] == status]
            # A process that stopped because of another one is less informative.
            failed.sort(key=lambda process: "stopped" in process["why"])
            if failed and all(p["status"] in _OVER for p in processes if p["here"]):
                return (FAILED if status == ENDED else status), failed[0]["why"]
        return self.people.run, ""

    def _process(self, name: str, role: str, now_s: float) -> dict[str, Any]:
        standing = self.people.standings.get(name)
        status, why = (standing.status, standing.why) if standing else (EXPECTED, "")
        since_s = standing.since_s if standing else 0.0
        process = self.processes.get(name)
        rates: Mapping[str, float] = {}
        if process is not None:
            # The last rounds show no pace while the process waits.
            rates = process.rates() if status == HERE else {}
            if process.facts.get("finished"):
                status, why = FINISHED, ""
            elif status not in _OVER and now_s - process.last_s > _SILENT_S and process.dead():
                status, why = ENDED, "its process has ended without a reason"
        sent, received = self._sums.get(name, (None, None))
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
        """Returns {phase: rounds} in the recipe's order; 0 if they are not known."""
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

    def _phases(self) -> list[dict[str, Any]]:
        """Returns the phases in their order, each with the smallest number of rounds of the parties
        that have begun it.
        """
        planned = self._count_rounds()
        phases = []
        for phase in dict.fromkeys(
            [*planned, *(name for done in self._done.values() for name in done)]
        ):
            counts = [done[phase] for done in self._done.values() if phase in done]
            rounds = max((total for _, total in counts), default=0) or planned.get(phase, 0)
            done_ = min((done for done, _ in counts), default=0)
            phases.append({"name": phase, "done": done_, "rounds": rounds})
        return phases

    def _estimate_left_s(self, now_s: float) -> float | None:
        """Estimates the seconds left in the current phase, at the pace of its last rounds; None if
        unknown.
        """
        left = []
        for process in self.processes.values():
            pace = process.rates().get("rounds", 0.0)
            last = process.lately[-1] if process.lately else None
            if last is not None and pace > 0 and last.rounds > last.round:
                left.append((last.rounds - last.round) / pace - (now_s - last.time_s))
        return max(0.0, *left) if left else None

    def _links(self) -> list[dict[str, Any]]:
        """Returns the bytes of each link, as counted by its sender, or else by its receiver."""
        links: dict[Link, tuple[int, float | None]] = {}
        for process in self.processes.values():
            rates = process.link_rates()
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


def _log_line(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of the log in the form of the page."""
    return {
        "at_s": time_of(line),
        "party": clean(shorten(name), MAX_NAME + 1),
        "level": clean(str(line.get("level", "")), MAX_NAME),
        "text": clean(line_text(line), LINE),
    }
