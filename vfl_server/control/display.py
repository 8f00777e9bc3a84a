"""What people see of a run's progress: the slowest party's, and the parties' notes, at a rate that
can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.guard.rate import Rate, append_held_count
from vfl_common.text import clean

# In a party's progress.
MAX_METRICS = 32
# Between two notes of a party, after the first five.
_NOTE_S, _NOTES = 1.0, 5
# Between two reports of progress, after the first twenty.
_SHOW_S, _SHOWN = 0.05, 20

Emit = Callable[..., None]
# {party: its last progress in this generation}, in roster order.
Reports = Mapping[str, control_pb2.Progress]


class Display:
    """Reports progress and notes. Not thread-safe: the coordinator calls it under its lock.

    Args:
        emit: reports events to the person or program in front of the server.
        phases: the recipe's, in order.
        active: the active party.

    ``shown``: the progress of the slowest party. ``steps``: of the run, as of a round's end.
    """

    def __init__(self, emit: Emit, phases: Sequence[str], active: str) -> None:
        self._emit, self._phases, self._active = emit, phases, active
        self._notes, self._shows = Rate(_NOTE_S, _NOTES), Rate(_SHOW_S, _SHOWN)
        # It is to be reported as soon as the rate allows it.
        self._unshown = False
        self.shown = control_pb2.Progress()
        self.steps = 0

    def begin(self) -> None:
        """Begins a generation."""
        self._unshown = False

    def take(self, party: str, reports: Reports, now_s: float) -> None:
        """Takes the news in ``reports``, which is ``party``'s."""
        slowest = pace(reports, self._phases, self._active, party)
        if slowest is not None and reports[slowest] is not self.shown:
            self.shown, self._unshown = reports[slowest], True
            self.steps = self.shown.steps or self.steps
            self.tick(reports, now_s)
        note = reports[party].note
        held = self._notes.passes(party, now_s) if note else None
        if held is not None:
            self._emit("note", party=party, note=append_held_count(clean(note), held))

    def tick(self, reports: Reports, now_s: float) -> None:
        """Reports the run's progress if there is any to report, and the last report is not too
        recent.
        """
        if self._unshown and self._shows.passes("", now_s) is not None:
            self.flush(reports)

    def flush(self, reports: Reports) -> None:
        """Reports the run's progress if there is any to report, with each party's own losses beside
        it.
        """
        if not self._unshown:
            return
        self._unshown, slowest = False, self.shown
        metrics_ = {
            name: metrics(values)
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
            metrics=metrics_.get(self._active, {}),
            parties={name: values for name, values in metrics_.items() if values},
        )


def metrics(progress: control_pb2.Progress) -> dict[str, float]:
    """Returns the metrics in the order of their names (on the wire they have none), limited in
    number and in length.
    """
    return {
        clean(name, 40): value for name, value in sorted(progress.metrics.items())[:MAX_METRICS]
    }


def pace(
    reports: Mapping[str, control_pb2.Progress], phases: Sequence[str], active: str, teller: str
) -> str | None:
    """Returns the slowest working party; if none is working, the one that just reported that it
    finished.

    A party is not working if it has finished the phase of its last report, or if the active party
    is in a later phase: the run continues without it. An idle active party, as in FedOnce's local
    phase, reports nothing; then the others decide.

    Args:
        reports: {party: its last progress in this generation}.
        phases: the recipe's phases, in order.
        active: the active party.
        teller: the party that reported last.

    Returns None if the reporting party no longer affects the run's progress.
    """
    place = {
        name: phases.index(report.phase)
        for name, report in reports.items()
        if report.phase in phases
    }
    front = place.get(active, 0)
    behind = {
        name: (place[name], _rounds(reports[name]))
        for name in place
        if place[name] >= front
        and not (reports[name].rounds and reports[name].round >= reports[name].rounds)
    }
    if behind:
        return min(behind, key=lambda name: behind[name])
    return teller if teller == active or place.get(teller, -1) >= front else None


def _rounds(progress: control_pb2.Progress) -> float:
    """Returns the finished rounds, with the fraction of the current one."""
    return progress.round + (progress.batch / progress.batches if progress.batches else 0.0)
