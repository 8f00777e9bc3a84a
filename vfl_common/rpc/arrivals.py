"""Decides whether a step may proceed: a pure function of who has arrived, who is away, and how long
it took.

``Patience`` keeps who is away. The clock is an argument everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proceed:
    """Everyone has arrived, or the step may do without the others."""


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Someone is missing, and has ``for_s`` seconds left."""

    for_s: float


@dataclass(frozen=True, slots=True)
class TimedOut:
    """``late``, in roster order, have used up their time."""

    late: tuple[str, ...]


_PROCEED = Proceed()
# For this many a party has to come in time, before another lateness is forgiven.
_DEADLINES = 9


class Patience:
    """Keeps which parties are away: those that have missed a step and have not come back.

    A party that comes back is waited for again. If it is late once more soon afterwards, within 9
    deadlines, it is not waited for during the next 9: so a party that is slow, or wants to hold the
    others up, costs them a tenth of their time. Until then it takes part in the steps for which it
    comes in time.
    """

    def __init__(self) -> None:
        self.away: frozenset[str] = frozenset()
        self._back_s: dict[str, float] = {}
        self._not_before_s: dict[str, float] = {}

    def missed(self, party: str, now_s: float, deadline_s: float) -> None:
        """Notes that a step went on without ``party``."""
        if (
            party not in self.away
            and now_s - self._back_s.get(party, -math.inf) < _DEADLINES * deadline_s
        ):
            self._not_before_s[party] = now_s + _DEADLINES * deadline_s
        self.away |= {party}

    def came(self, party: str, now_s: float) -> None:
        """Notes that ``party`` has come back, and knows which step is under way."""
        if now_s >= self._not_before_s.get(party, -math.inf):
            self._back_s[party] = now_s
            self.away -= {party}


def decide(
    waited_s: float,
    arrived: Collection[str],
    roster: Sequence[str],
    timeout_s: float,
    deadline_s: float = math.inf,
    *,
    away: Collection[str] = (),
    at_least: int = 0,
) -> Proceed | KeepWaiting | TimedOut:
    """Proceeds when all of ``roster`` have arrived or at ``deadline_s``; gives up on late parties
    at ``timeout_s``.

    With a deadline, parties that are ``away`` are not waited for at all.

    Args:
        waited_s: time since the step began.
        arrived: the parties whose bundle is here.
        roster: all parties.
        timeout_s: how long a living party may take.
        deadline_s: how long a step waits that may do without the late parties.
        away: parties that have missed an earlier step, and have not come back since.
        at_least: the number of parties that a step with a deadline needs.
    """
    if len(arrived) == len(roster):
        return _PROCEED
    missing = tuple(party for party in roster if party not in arrived)
    if len(arrived) < at_least:
        deadline_s = math.inf
    elif not math.isinf(deadline_s) and all(party in away for party in missing):
        deadline_s = 0.0
    if waited_s >= deadline_s:
        return _PROCEED
    if waited_s >= timeout_s:
        return TimedOut(missing)
    return KeepWaiting(min(timeout_s, deadline_s) - waited_s)
