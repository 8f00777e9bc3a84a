"""Reports the progress of a search, read from its journal: the trials of all drivers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vfl.searching import journal
from vfl.searching.claims import Claims
from vfl.searching.found import trial_of
from vfl.searching.trying import TrialPlan
from vfl.studies.lines import format_axis_value
from vfl.studies.show import duration

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

Tell = Callable[[dict[str, Any]], None]


class SearchProgress:
    """Reports a search. ``tell``: called with an event at the beginning, and when a trial has
    ended. ``jobs``: trials at a time. Raises InputError if the journal is of another search.
    """

    def __init__(self, plan: TrialPlan, tell: Tell, jobs: int) -> None:
        self._plan, self._tell, self._jobs = plan, tell, jobs
        with Claims(plan.folder) as claims, claims.choosing():
            self._study = plan.open_study()
        self._seen = {trial.number for trial in journal.get_ended_trials(self._study)}
        folder, runs = str(plan.folder), plan.every
        tell({"event": "study", "folder": folder, "runs": runs, "left": self.left})

    @property
    def left(self) -> int:
        """The number of trials that had not ended at the last look."""
        return max(0, self._plan.every - len(self._seen))

    def look(self) -> None:
        """Reports the trials that have ended since the last look."""
        ended = journal.get_ended_trials(self._study)
        for trial in sorted(ended, key=_end_time_s):
            if trial.number not in self._seen:
                self._seen.add(trial.number)
                self._tell(self._event(trial, ended))

    def _event(self, trial: FrozenTrial, ended: list[FrozenTrial]) -> dict[str, Any]:
        one = trial_of(trial, self._plan.spaces)
        took = [t.duration.total_seconds() for t in ended if t.duration is not None]
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


def _end_time_s(trial: FrozenTrial) -> float:
    return trial.datetime_complete.timestamp() if trial.datetime_complete is not None else 0.0


def short(value: Any) -> str:
    """Formats a value of a key for a person."""
    return f"{value:.4g}" if isinstance(value, float) else format_axis_value(value)


def sentence(event: dict[str, Any]) -> str:
    """Formats an event of a trial for a person."""
    ends = {
        "finished": lambda: f"{event['objective']} {event['value']:.4g}",
        "pruned": lambda: f"pruned after {event['rounds']} rounds",
        "failed": lambda: f"failed: {event['error']}",
    }
    left = f"; about {duration(event['left_s'])} left" if event["left_s"] else ""
    return (
        f"run {event['number']} of {event['of']}: {event['title']}: "
        f"{ends[event['event']]()}, {event['seconds']:.1f} s{left}"
    )
