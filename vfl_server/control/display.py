"""Reports a run's progress to people: the slowest party's progress and the parties' notes, at a
rate that people can read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.guard.rate import Rate, append_held_count
from vfl_common.text import clean

# The maximum number of metrics in a party's progress.
MAX_METRICS = 32
# After a party's first five notes, the minimum seconds between two notes.
_NOTE_S, _NOTES = 1.0, 5
# After the first twenty reports of progress, the minimum seconds between two reports.
_SHOW_S, _SHOWN = 0.05, 20

Emit = Callable[..., None]
# {party: its last progress in this generation}, in roster order.
Reports = Mapping[str, control_pb2.Progress]


class Display:
    """Reports progress and notes. Not thread-safe: the coordinator calls it under its lock.

    Args:
        emit: Reports events to the person or program that started the server.
        phases: The names of the recipe's phases, in order.
        active: The active party.

    ``shown``: The progress of the slowest party. ``steps``: The run's training steps, as of the end
    of a round.
    """

    def __init__(self, emit: Emit, phases: Sequence[str], active: str) -> None:
        self._emit, self._phases, self._active = emit, phases, active
        self._notes, self._shows = Rate(_NOTE_S, _NOTES), Rate(_SHOW_S, _SHOWN)
        # Whether ``shown`` is to be reported as soon as the rate allows it.
        self._has_unreported = False
        self.shown = control_pb2.Progress()
        self.steps = 0

    def begin(self) -> None:
        """Begins a generation: drops progress that was not reported."""
        self._has_unreported = False

    def take(self, party: str, reports: Reports, now_s: float) -> None:
        """Handles the new progress of ``party`` in ``reports``: reports the run's progress and the
        party's note.
        """
        slowest = find_slowest(reports, self._phases, self._active, party)
        if slowest is not None and reports[slowest] is not self.shown:
            self.shown, self._has_unreported = reports[slowest], True
            self.steps = self.shown.steps or self.steps
            self.tick(reports, now_s)
        note = reports[party].note
        held = self._notes.passes(party, now_s) if note else None
        if held is not None:
            self._emit("note", party=party, note=append_held_count(clean(note), held))

    def tick(self, reports: Reports, now_s: float) -> None:
        """Reports the run's progress if there is unreported progress and the last report is not too
        recent.
        """
        if self._has_unreported and self._shows.passes("", now_s) is not None:
            self.flush(reports)

    def flush(self, reports: Reports) -> None:
        """Reports the run's progress, and each party's metrics, if there is unreported progress."""
        if not self._has_unreported:
            return
        self._has_unreported, slowest = False, self.shown
        metrics = {
            name: get_metrics(values)
            for name, values in reports.items()
            if values.phase == slowest.phase
        }
        self._emit(
            "progress",
            phase=slowest.phase,
            round=slowest.round,
            rounds=slowest.rounds,
            batch=slowest.batch,
            batches=slowest.batches,
            steps=slowest.steps,
            metrics=metrics.get(self._active, {}),
            parties={name: values for name, values in metrics.items() if values},
        )


def get_metrics(progress: control_pb2.Progress) -> dict[str, float]:
    """Returns a party's metrics, sorted by name. Limits the number of metrics and the length of
    their names.
    """
    return {
        clean(name, 40): value for name, value in sorted(progress.metrics.items())[:MAX_METRICS]
    }


def find_slowest(
    reports: Mapping[str, control_pb2.Progress], phases: Sequence[str], active: str, reporter: str
) -> str | None:
    """Returns the slowest working party; if no party is working, the party that has just reported
    that it finished.

    A party is not working if it has finished the phase of its last report, or if the active party
    is in a later phase. If the active party is idle, as in FedOnce's local phase, it reports
    nothing, and only the other parties count.

    Args:
        reports: {party: its last progress in this generation}.
        phases: The recipe's phases, in order.
        active: The active party.
        reporter: The party that reported last.

    Returns None if the reporting party no longer affects the run's progress.
    """
    phase_numbers = {
        name: phases.index(report.phase)
        for name, report in reports.items()
        if report.phase in phases
    }
    active_phase = phase_numbers.get(active, 0)
    working = {
        name: (phase_numbers[name], _count_rounds(reports[name]))
        for name in phase_numbers
        if phase_numbers[name] >= active_phase
        and not (reports[name].rounds and reports[name].round >= reports[name].rounds)
    }
    if working:
        return min(working, key=lambda name: working[name])
    return (
        reporter if reporter == active or phase_numbers.get(reporter, -1) >= active_phase else None
    )


def _count_rounds(progress: control_pb2.Progress) -> float:
    """Returns the number of finished rounds plus the finished fraction of the current round."""
    return progress.round + (progress.batch / progress.batches if progress.batches else 0.0)
