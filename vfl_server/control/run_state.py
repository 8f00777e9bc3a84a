"""The states of a run and the moves between them."""

from __future__ import annotations

from enum import Enum

from vfl_common.errors import InternalError


class RunState(Enum):
    """WAITING for parties (at the start, or after a loss), RUNNING a generation, then COMPLETED or FAILED."""

    WAITING = "waiting"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


MOVES: frozenset[tuple[RunState, RunState]] = frozenset(
    {
        (RunState.WAITING, RunState.RUNNING),  # all parties have joined
        (RunState.RUNNING, RunState.WAITING),  # a party was lost
        (RunState.RUNNING, RunState.COMPLETED),  # all have reported
        (RunState.WAITING, RunState.FAILED),
        (RunState.RUNNING, RunState.FAILED),
    }
)


def move(now: RunState, to: RunState) -> RunState:
    """Returns ``to``. Raises InternalError if the move is not in MOVES."""
    if (now, to) not in MOVES:
        raise InternalError(f"a run cannot move from {now.value} to {to.value}")
    return to
