"""Decides whether a step may proceed: a pure function of who has arrived and how long it took."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proceed:
    """Everyone has arrived, or the deadline for the others has passed."""


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
) -> Proceed | KeepWaiting | TimedOut:
    """Proceeds when all of ``roster`` have arrived or at ``deadline_s``; gives up on late parties at ``timeout_s``."""
    if len(arrived) == len(roster) or waited_s >= deadline_s:
        return _PROCEED
    if waited_s < timeout_s:
        return KeepWaiting(min(timeout_s, deadline_s) - waited_s)
    return TimedOut(tuple(party for party in roster if party not in arrived))
