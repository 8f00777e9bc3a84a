"""The states of a run and the moves between them."""

from __future__ import annotations

from enum import Enum

from vfl_common.errors import InternalError


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
