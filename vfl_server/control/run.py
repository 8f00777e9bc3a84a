"""Defines a run's parameters, its hooks, its states with their transitions, and its status; stores
the parties that have left, so that a restarted server does not wait for them; and reports a run's
progress to people, at a rate that people can read.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from vfl_common.bundle import OLDEST
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, InternalError, VflError
from vfl_common.files import write_atomic
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.process.logs import Rate, append_held_count
from vfl_common.stages import AggregationPlan, Job
from vfl_common.summary import PartySummary
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


@dataclass(frozen=True)
class Left:
    """A party that has sent its report and left the run. It exchanges no more data in the run."""

    identity: PartySummary
    report: control_pb2.Report


@dataclass(frozen=True)
class Departures:
    """Stores departures in the file ``left.json``: {party: {identity, report}}. The report is the
    party's message in base64.
    """

    path: Path

    def add(self, left: Left) -> None:
        """Records in the file that a party has left."""
        report = b64encode(left.report.SerializeToString()).decode()
        entry = {"identity": left.identity.model_dump(mode="json"), "report": report}
        write_atomic(self.path, json.dumps(self._entries() | {left.identity.name: entry}) + "\n")

    def read(self) -> dict[str, Left]:
        """Reads {party: its identity and report}. Raises InputError if the file is not in the
        format that ``add`` writes.
        """
        try:
            return {
                name: Left(
                    PartySummary.model_validate(entry["identity"]),
                    control_pb2.Report.FromString(b64decode(entry["report"])),
                )
                for name, entry in self._entries().items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            # Pydantic's text has several lines.
            reason = " ".join(str(error).split())
            raise InputError(
                Code.FILE_INVALID,
                f"{self.path}: the file cannot be read ({reason}). Begin a new run with --fresh at "
                "the server and every party.",
            ) from None

    def _entries(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}


@dataclass(frozen=True)
class ServedRun:
    """A run, and the progress that earlier processes of this server made in it.

    Args:
        recipe: The server's copy of the recipe. A party whose copy differs is refused.
        job: ``train`` or ``predict``.
        run_id: The id of this run.
        oldest: The oldest protocol version with which this server can serve the recipe.
        generation: The number of the last generation that an earlier process started.
        left: {party: its departure} for the parties that have left the run.
        completed: Whether an earlier process has completed the run. The parties may not know it
            yet.
        ran_s: The seconds since an earlier process first started the run; 0 if no earlier process
            did.
        under_way: Whether an earlier process died in the last generation, which may have continued
            without a server.
    """

    recipe: Recipe
    job: Job
    run_id: str
    oldest: int = OLDEST
    generation: int = 0
    left: Mapping[str, Left] = field(default_factory=dict)
    completed: bool = False
    ran_s: float = 0.0
    under_way: bool = False


@dataclass(frozen=True)
class RunHooks:
    """The callbacks of a coordinator, which calls them under its lock.

    Args:
        emit: Reports events to the person or program that started the server.
        on_start: Called with (generation, checkpoint) when a generation starts, before the parties
            get the Start message.
        on_plan: Called with (generation, checkpoint, agreed aggregations) once all parties have
            sent their plans.
        on_end: Called with the reason when a started generation or the run ends.
        on_leave: Called with the departure of a party that is no longer needed, before the party is
            dismissed.
        released: Returns why a party may leave another run that it offers to resume; '' if it must
            not.
        expired: Returns whether the run is set aside if a party's data have changed since the run
            began.
    """

    emit: Emit
    on_start: Callable[[int, str], None]
    on_plan: Callable[[int, str, tuple[AggregationPlan, ...]], None]
    on_end: Callable[[VflError], None] = lambda _: None
    on_leave: Callable[[Left], None] = lambda _: None
    released: Callable[[str], str] = lambda _run_id: ""
    expired: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class PresenceRules:
    """The recipe's settings for the parties' presence. ``learns``: Whether the active party has
    features.
    """

    roster: tuple[str, ...]
    active: str
    learns: bool
    trains: bool
    aligns: bool
    heartbeat_s: float
    lost_after_s: float
    join_deadline_s: float
    rejoin_deadline_s: float
    step_timeout_s: float
    server_absent_s: float

    @classmethod
    def of(cls, recipe: Recipe, job: Job) -> PresenceRules:
        """Reads the rules for a job from a recipe."""
        run = recipe.run
        return cls(
            tuple(party.name for party in recipe.parties),
            recipe.active.name,
            learns=bool(recipe.active.features),
            trains=job == "train",
            aligns=recipe.rows.align != "digest",
            heartbeat_s=run.heartbeat_s,
            lost_after_s=run.lost_after_s,
            join_deadline_s=run.join_deadline_s,
            rejoin_deadline_s=run.rejoin_deadline_s,
            step_timeout_s=run.step_timeout_s,
            server_absent_s=run.server_absent_s,
        )

    @property
    def plan_s(self) -> float:
        """The seconds in which a party must send its plan: twice the step timeout if rows are
        aligned. Then a party that waits for another party in the alignment reports that party
        first.
        """
        return self.step_timeout_s * (2 if self.aligns else 1)


class RunState(Enum):
    """The state of a run: WAITING for parties (at the start, or after a loss), RUNNING a
    generation, then COMPLETED or FAILED.
    """

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


MOVES: frozenset[tuple[RunState, RunState]] = frozenset(
    {
        # All parties have joined.
        (RunState.WAITING, RunState.RUNNING),
        # A party was lost, or joins again.
        (RunState.RUNNING, RunState.WAITING),
        # All parties have reported.
        (RunState.RUNNING, RunState.COMPLETED),
        (RunState.WAITING, RunState.FAILED),
        (RunState.RUNNING, RunState.FAILED),
    }
)


def move(now: RunState, to: RunState) -> RunState:
    """Returns the state ``to``. Raises InternalError if the transition is not in MOVES."""
    if (now, to) not in MOVES:
        raise InternalError(f"a run cannot move from {now.value} to {to.value}")
    return to


@dataclass(frozen=True)
class Status:
    """The state and progress of a run at one moment.

    ``at_work``: Whether a generation is running and all its parties have sent their plans.
    ``wall_s``: The seconds since the run's first start; 0 before the start. ``silent_s``: {party
    with a session: seconds since its last message}. ``phase`` to ``steps``: The slowest party's
    last progress; ``steps`` as of a round's end. ``reported``: {party: (phase, metrics)}, from each
    party's last progress.
    """

    state: RunState
    generation: int
    interruptions: int
    at_work: bool
    wall_s: float
    joined: tuple[str, ...]
    left: tuple[str, ...]
    silent_s: dict[str, float]
    phase: str
    round: int
    rounds: int
    steps: int
    reported: dict[str, tuple[str, dict[str, float]]]
