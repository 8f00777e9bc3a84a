"""Decides what to do next: pure functions of who has joined. The clock is an argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Begin:
    """All needed parties have joined: start a generation from ``checkpoint`` (empty: from the beginning)."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Wait:
    """``missing`` have ``left_s`` seconds to come."""

    missing: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """``missing`` did not come in time."""

    missing: tuple[str, ...]
    reason: str


def decide(
    waited_s: float,
    deadline_s: float,
    roster: Sequence[str],
    ready: Mapping[str, Sequence[str]],
    left: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Begin | Wait | GiveUp:
    """Decides whether the run may start.

    Args:
        waited_s: time since the server began to wait.
        deadline_s: the longest time to wait.
        roster: all parties of the recipe.
        ready: {party: labels of its checkpoints, oldest first}, of the joined parties.
        left: {party: labels from which the run does not need it}, of the parties that have left.
    """
    missing = tuple(party for party in roster if party not in ready and party not in left)
    if not missing:
        checkpoint = newest_common(ready.values())
        missing = tuple(party for party in roster if party not in ready and checkpoint not in left[party])
        if not missing:
            return Begin(checkpoint)
    if waited_s < deadline_s:
        return Wait(missing, deadline_s - waited_s)
    return GiveUp(missing, f"{', '.join(missing)} did not come within {deadline_s:g} s")


def newest_common(held: Collection[Sequence[str]]) -> str:
    """Returns the newest label that every party holds, '' if there is none. Labels sort by position in the run."""
    common = set.intersection(*(set(labels) for labels in held)) if held else set()
    return max(common, default="")


def silent(now_s: float, heard_s: Mapping[str, float], lost_after_s: float) -> tuple[str, ...]:
    """Returns the parties that have sent nothing, not even a heartbeat, for ``lost_after_s``."""
    return tuple(party for party, last_s in heard_s.items() if now_s - last_s > lost_after_s)


def unplanned(since_start_s: float, planned: Mapping[str, bool], timeout_s: float) -> tuple[str, ...]:
    """Returns the parties that have not said, ``timeout_s`` after a generation's start, what they are going to do."""
    return tuple(party for party, said in planned.items() if not said) if since_start_s > timeout_s else ()
