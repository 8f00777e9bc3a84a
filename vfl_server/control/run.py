"""Defines a run's parameters, its hooks, its states with their transitions, and its status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from vfl_common.config.recipe import Recipe
from vfl_common.errors import InternalError, VflError
from vfl_common.link import OLDEST
from vfl_common.stages import AggregationPlan, Job
from vfl_server.control.departures import Left
from vfl_server.control.display import Emit


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
