"""Reports the progress of a search, by the trials of all drivers in its journal."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING, Any

from vfl_lab.searching import journal
from vfl_lab.searching.claims import Claims
from vfl_lab.searching.found import convert_trial
from vfl_lab.searching.trying import TrialPlan
from vfl_lab.studies.lines import format_axis_value
from vfl_lab.studies.show import format_duration

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

Tell = Callable[[dict[str, Any]], None]


class SearchProgress:
    """Reports the progress of a search as events.

    Args:
        plan: The plan of the search.
        tell: A function that is called with an event at the beginning, and when a trial has ended.
        jobs: The number of trials that run at the same time.

    Raises InputError if the journal belongs to another search.
    """

    def __init__(self, plan: TrialPlan, tell: Tell, jobs: int) -> None:
        self._plan, self._tell, self._jobs = plan, tell, jobs
        with Claims(plan.folder) as claims, claims.lock_choice():
            self._study = plan.open_study()
        self._seen = {trial.number for trial in journal.get_ended_trials(self._study)}
        folder, runs = str(plan.folder), plan.trial_count
        tell({"event": "study", "folder": folder, "runs": runs, "left": self.left})

    @property
    def left(self) -> int:
        """The number of trials that had not ended at the last call of ``look``."""
        return max(0, self._plan.trial_count - len(self._seen))

    def look(self) -> None:
        """Reports the trials that have ended since the last call."""
        ended = journal.get_ended_trials(self._study)
        for trial in sorted(ended, key=_get_end_time_s):
            if trial.number not in self._seen:
                self._seen.add(trial.number)
                self._tell(self._make_event(trial, ended))

    def _make_event(self, trial: FrozenTrial, ended: list[FrozenTrial]) -> dict[str, Any]:
        converted = convert_trial(trial, self._plan.spaces)
        durations_s = [t.duration.total_seconds() for t in ended if t.duration is not None]
        duration_s = trial.duration.total_seconds() if trial.duration is not None else 0.0
        return {
            "event": converted.state,
            "number": len(self._seen),
            "of": self._plan.trial_count,
            "title": ", ".join(
                f"{key} = {format_value(value)}" for key, value in converted.values.items()
            ),
            "values": converted.values,
            "objective": self._plan.objective,
            "value": converted.value,
            "rounds": converted.rounds,
            "error": converted.error,
            "seconds": round(duration_s, 3),
            "left_s": fmean(durations_s) * self.left / self._jobs if durations_s else None,
        }


def _get_end_time_s(trial: FrozenTrial) -> float:
    return trial.datetime_complete.timestamp() if trial.datetime_complete is not None else 0.0


def format_value(value: Any) -> str:
    """Formats a value of a recipe's key as short text."""
    return f"{value:.4g}" if isinstance(value, float) else format_axis_value(value)


def sentence(event: dict[str, Any]) -> str:
    """Formats an event of a trial as a line of text."""
    formatters = {
        "finished": lambda: f"{event['objective']} {event['value']:.4g}",
        "pruned": lambda: f"pruned after {event['rounds']} rounds",
        "failed": lambda: f"failed: {event['error']}",
    }
    left = f"; about {format_duration(event['left_s'])} left" if event["left_s"] else ""
    return (
        f"run {event['number']} of {event['of']}: {event['title']}: "
        f"{formatters[event['event']]()}, {event['seconds']:.1f} s{left}"
    )
