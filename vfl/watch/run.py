"""Follows the files of one run, whichever processes have folders here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.report.rounds import Source
from vfl.watch.curves import MOST_NAME, Curves
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
from vfl_common.process.logs import worded
from vfl_common.text import LINE, clean, shortened

# Lines of the log that a page has.
MOST_LINES = 300
# Processes, and links between them, of a page.
MOST_PROCESSES = 200
MOST_LINKS = 400
# A process that has written nothing for so long, and is gone, has ended.
_SILENT_S = 5.0
# Events that the progress shows anyway.
_SHOWN = frozenset({"round", "progress", "trained"})
_OVER = (FINISHED, FAILED, STOPPED, LEFT, LOST, AWAY, ENDED)


@dataclass
class RunFollower:
    """One run: ``state()`` is all but the curves and the log, which grow.

    ``log``: (reading, line) of the last lines.
    """

    folder: Path
    processes: dict[str, Watched] = field(default_factory=dict)
    curves: Curves = field(default_factory=Curves)
    people: People = field(default_factory=People)
    log: deque[tuple[int, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=MOST_LINES))
    recipe: dict[str, Any] = field(default_factory=dict)
    # {phase: (rounds done, planned)}, of each party.
    _done: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    _sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    _aside: str = ""

    def replaced(self) -> bool:
        """Whether the run's files are gone, or others."""
        return any(each.replaced() for each in self.processes.values())

    def read(self, version: int) -> bool:
        """Reads what is new in all folders; ``version``: the number of this reading. Returns
        whether there are new lines.
        """
        found = sorted(path.parent for path in self.folder.glob("*/run.json"))
        for folder in found[:MOST_PROCESSES]:
            self.processes.setdefault(folder.name, Watched(folder))
        self._read_recipe()
        lines, rounds = [], 0
        for name, process in self.processes.items():
            news = process.read()
            lines += [(time_of(line), name, line) for line in news.log]
            rounds += len(news.rounds)
            for each in news.rounds:
                self.curves.take(version, name, each)
                phase = clean(each.phase, MOST_NAME)
                self._done.setdefault(name, {})[phase] = (each.round, each.rounds)
                self._steps[name] = each.steps
                self._sums[name] = (each.values["bytes/sent"], each.values["bytes/received"])
        # As they happened, whoever wrote them.
        for _, name, line in sorted(lines, key=lambda each: each[0]):
            self.people.take(name, line)
            if line.get("event") not in _SHOWN:
                self.log.append((version, _shown(name, line)))
        return bool(lines or rounds)

    def _read_recipe(self) -> None:
        """Reads the recipe once, from the first process that has a copy."""
        if self.recipe:
            self.people.expect(self.processes)
            return
        copies = (Source(each.folder).read("recipe.json") for each in self.processes.values())
        self.recipe = next((each for each in copies if each), {})
        self.people.server = str(self.recipe.get("server", ""))
        self.people.expect(name for name in self._roster() if name)

    def _roster(self) -> dict[str, str]:
        """Returns {name: role}, the server first."""
        found = {self.people.server: "server"} if self.people.server else {}
        parties = self.recipe.get("parties")
        for each in parties if isinstance(parties, list) else ():
            if isinstance(each, dict) and isinstance(each.get("name"), str):
                found[each["name"]] = clean(str(each.get("role", "")), MOST_NAME)
        for name in self.processes:
            found.setdefault(name, "")
        return dict(list(found.items())[:MOST_PROCESSES])

    def state(self) -> dict[str, Any]:
        """Returns what the page shows beside curves and log."""
        now_s = time.time()
        processes = [self._process(name, role, now_s) for name, role in self._roster().items()]
        state, why = self._run_state(processes)
        return {
            "run": clean(self.folder.name, MOST_NAME),
            "recipe": clean(str(self.recipe.get("name", "")), MOST_NAME),
            "state": state,
            "why": why,
            "phases": self._phases(),
            "left_s": self._left_s(now_s) if state == "running" else None,
            "processes": processes,
            "links": self._links(),
        }

    def _run_state(self, processes: list[dict[str, Any]]) -> tuple[str, str]:
        here = self.processes.values()
        aside = [each.facts.get("set_aside") for each in here]
        for each in aside:
            if isinstance(each, dict):
                return "set aside", clean(str(each.get("why", "")), LINE)
        if here and all(each.facts.get("finished") for each in here):
            return FINISHED, ""
        for status in (FAILED, STOPPED, ENDED):
            failed = [each for each in processes if each["status"] == status]
            # Who has stopped because of another says less.
            failed.sort(key=lambda each: "stopped" in each["why"])
            if failed and all(each["status"] in _OVER for each in processes if each["here"]):
                return (FAILED if status == ENDED else status), failed[0]["why"]
        return self.people.run, ""

    def _process(self, name: str, role: str, now_s: float) -> dict[str, Any]:
        standing = self.people.standings.get(name)
        status, why = (standing.status, standing.why) if standing else (EXPECTED, "")
        since_s = standing.since_s if standing else 0.0
        process = self.processes.get(name)
        rates: Mapping[str, float] = {}
        if process is not None:
            # The last rounds say nothing of a time in which none ends.
            rates = process.rates() if status == HERE else {}
            if process.facts.get("finished"):
                status, why = FINISHED, ""
            elif status not in _OVER and now_s - process.last_s > _SILENT_S and process.dead():
                status, why = ENDED, "its process has ended and has not said why"
        sent, received = self._sums.get(name, (None, None))
        return {
            "name": clean(shortened(name), MOST_NAME + 1),
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

    def _planned(self) -> dict[str, int]:
        """Returns {phase: rounds} in the recipe's order; 0 if they are not known."""
        found: dict[str, int] = {}
        phases = self.recipe.get("phases")
        plans = [each.facts.get("plan") for each in self.processes.values()]
        for plan in [phases, *plans]:
            for each in plan if isinstance(plan, list) else ():
                if isinstance(each, dict) and isinstance(each.get("name"), str):
                    rounds = each.get("rounds")
                    name = clean(each["name"], MOST_NAME)
                    found[name] = rounds if isinstance(rounds, int) else found.get(name, 0)
        return found

    def _phases(self) -> list[dict[str, Any]]:
        """Returns the phases in their order, each with the rounds of the party that has done the
        fewest of those that have begun it.
        """
        planned = self._planned()
        found = []
        for phase in dict.fromkeys(
            [*planned, *(name for of in self._done.values() for name in of)]
        ):
            told = [of[phase] for of in self._done.values() if phase in of]
            rounds = max((each[1] for each in told), default=0) or planned.get(phase, 0)
            done = min((each[0] for each in told), default=0)
            found.append({"name": phase, "done": done, "rounds": rounds})
        return found

    def _left_s(self, now_s: float) -> float | None:
        """Estimates the seconds left in the phase under way, at the pace of its last rounds; None
        if unknown.
        """
        left = []
        for process in self.processes.values():
            pace = process.rates().get("rounds", 0.0)
            last = process.lately[-1] if process.lately else None
            if last is not None and pace > 0 and last.rounds > last.round:
                left.append((last.rounds - last.round) / pace - (now_s - last.time_s))
        return max(0.0, *left) if left else None

    def _links(self) -> list[dict[str, Any]]:
        """Returns the bytes of each link, as its sender has counted them, or else its receiver."""
        found: dict[Link, tuple[int, float | None]] = {}
        for process in self.processes.values():
            rates = process.link_rates()
            for link, count in process.links[1].items():
                if link not in found or link[0] == process.name:
                    found[link] = (count, rates.get(link))
        most = sorted(found.items(), key=lambda each: -each[1][0])[:MOST_LINKS]
        return [
            {
                "from": clean(shortened(link[0]), MOST_NAME + 1),
                "to": clean(shortened(link[1]), MOST_NAME + 1),
                "bytes": count,
                "rate": rate,
            }
            for link, (count, rate) in sorted(most)
        ]


def _shown(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of the log as a page shows it."""
    return {
        "at_s": time_of(line),
        "party": clean(shortened(name), MOST_NAME + 1),
        "level": clean(str(line.get("level", "")), MOST_NAME),
        "text": clean(worded(line), LINE),
    }
