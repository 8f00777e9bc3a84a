"""A run: what its server is given, its states and the moves between them, and how it is at one
moment.
"""

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
    """One run, and what earlier processes of this server did of it.

    Args:
        recipe: the server's copy; a party whose copy differs is refused.
        job: ``train`` or ``predict``.
        run_id: this run's name.
        oldest: the oldest protocol that this server can serve the recipe with.
        generation: the last generation that an earlier process started.
        left: the parties that left.
        completed: an earlier process has completed the run; the parties may not know it yet.
        ran_s: seconds since an earlier process first started the run; 0 if none did.
        under_way: an earlier process died in the last generation, which may have gone on without
            it.
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
    """What a coordinator calls, under its lock.

    Args:
        emit: reports events to the person or program in front of the server.
        on_start: called with (generation, checkpoint) when a generation starts, before the parties
            hear of it.
        on_plan: called with (generation, checkpoint, agreed aggregations) once all parties have
            sent their plans.
        on_end: called with the reason when a started generation or the run ends.
        on_leave: called with a party that is no longer needed, before it hears that it may leave.
        released: says why a party leaves another run that it has offered; '' if it must not.
        expired: whether the run is set aside if a party's data have changed since it began.
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
    """What the recipe says of presence. ``learns``: the active party has features of its own."""

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
        """Reads the rules of a job."""
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
        """How long a party may take to plan. In an alignment, the parties first name the one that
        they wait for.
        """
        return self.step_timeout_s * (2 if self.aligns else 1)


class RunState(Enum):
    """WAITING for parties (at the start, or after a loss), RUNNING a generation, then COMPLETED or
    FAILED.
    """

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


MOVES: frozenset[tuple[RunState, RunState]] = frozenset(
    {
        # All parties have joined.
        (RunState.WAITING, RunState.RUNNING),
        # A party was lost.
        (RunState.RUNNING, RunState.WAITING),
        # All have reported.
        (RunState.RUNNING, RunState.COMPLETED),
        (RunState.WAITING, RunState.FAILED),
        (RunState.RUNNING, RunState.FAILED),
    }
)


def move(now: RunState, to: RunState) -> RunState:
    """Returns ``to``. Raises InternalError if the move is not in MOVES."""
    if (now, to) not in MOVES:
        raise InternalError(f"a run cannot move from {now.value} to {to.value}")
    return to


@dataclass(frozen=True)
class Status:
    """The run at one moment.

    ``at_work``: a generation is under way, and all its parties have said what they are going to
    do. ``wall_s``: seconds since the run's first start; 0 before it. ``silent_s``: {party with a
    session: seconds since its last message}. ``phase`` to ``steps``: the slowest party's last
    report; ``steps`` as of a round's end. ``told``: {party: (phase, metrics)}, from each party's
    last report.
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
    told: dict[str, tuple[str, dict[str, float]]]
