"""Tells of a search while it goes on: from its journal, so of the trials of all drivers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vfl.searching import journal
from vfl.searching.claims import Claims
from vfl.searching.found import trial_of
from vfl.searching.trying import Plan
from vfl.studies.lines import named
from vfl.studies.show import duration

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

Tell = Callable[[dict[str, Any]], None]


class Progress:
    """What is told of a search. ``tell``: called with an event at the beginning, and when a trial
    has ended. ``jobs``: trials at a time. Raises InputError if the journal is of another search.
    """

    def __init__(self, plan: Plan, tell: Tell, jobs: int) -> None:
        self._plan, self._tell, self._jobs = plan, tell, jobs
        with Claims(plan.folder) as claims, claims.choosing():
            self._study = plan.opened()
        self._seen = {each.number for each in journal.ended(self._study)}
        folder, runs = str(plan.folder), plan.every
        tell({"event": "study", "folder": folder, "runs": runs, "left": self.left})

    @property
    def left(self) -> int:
        """The number of trials that had not ended when it was last looked."""
        return max(0, self._plan.every - len(self._seen))

    def look(self) -> None:
        """Tells of the trials that have ended since."""
        ended = journal.ended(self._study)
        for each in sorted(ended, key=_ended_s):
            if each.number not in self._seen:
                self._seen.add(each.number)
                self._tell(self._event(each, ended))

    def _event(self, trial: FrozenTrial, ended: list[FrozenTrial]) -> dict[str, Any]:
        one = trial_of(trial, self._plan.spaces)
        took = [each.duration.total_seconds() for each in ended if each.duration is not None]
        own = trial.duration.total_seconds() if trial.duration is not None else 0.0
        return {
            "event": one.state,
            "number": len(self._seen),
            "of": self._plan.every,
            "title": ", ".join(f"{key} = {short(value)}" for key, value in one.values.items()),
            "values": one.values,
            "objective": self._plan.objective,
            "value": one.value,
            "rounds": one.rounds,
            "error": one.error,
            "seconds": round(own, 3),
            "left_s": fmean(took) * self.left / self._jobs if took else None,
        }


def _ended_s(trial: FrozenTrial) -> float:
    return trial.datetime_complete.timestamp() if trial.datetime_complete is not None else 0.0


def short(value: Any) -> str:
    """Words a value of a key for a person."""
    return f"{value:.4g}" if isinstance(value, float) else named(value)


def sentence(event: dict[str, Any]) -> str:
    """Words an event of a trial for a person."""
    ends = {
        "finished": lambda: f"{event['objective']} {event['value']:.4g}",
        "pruned": lambda: f"pruned after {event['rounds']} rounds",
        "failed": lambda: f"failed: {event['error']}",
    }
    left = f"; about {duration(event['left_s'])} left" if event["left_s"] else ""
    head = f"run {event['number']} of {event['of']}: {event['title']}"
    return f"{head}: {ends[event['event']]()}, {event['seconds']:.1f} s{left}"
