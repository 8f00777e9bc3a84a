"""Decides whether a step may proceed: a pure function of who has arrived, who is away, and how long it took."""

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
    """Proceeds when all of ``roster`` have arrived or at ``deadline_s``; gives up on late parties at ``timeout_s``.

    With a deadline, parties that are ``away`` are not waited for at all.

    Args:
        waited_s: time since the step began.
        arrived: the parties whose bundle is here.
        roster: all parties.
        timeout_s: how long a living party may take.
        deadline_s: how long a step waits that may do without the late parties.
        away: parties that have missed an earlier step, and have not come back since.
        at_least: a step with a deadline needs so many parties.
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
