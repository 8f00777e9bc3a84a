"""Decides whether a run may begin, and where: pure functions of who has joined. The clock is an
argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Begin:
    """All needed parties have joined: start a generation from ``checkpoint`` (empty: from the
    beginning).
    """

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Wait:
    """``missing`` have ``left_s`` seconds to come."""

    missing: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """There is no label at which all can resume; most can at ``label``, and ``lacking`` cannot."""

    lacking: tuple[str, ...]
    label: str


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
    active: str = "",
    held: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Begin | Wait | Refuse | GiveUp:
    """Decides whether the run may start.

    A party offers ``""``, the run's beginning, only if it has not got further than a death can
    explain. So a party that offers less than it must have cannot take the others back: it is
    refused.

    Args:
        waited_s: time since the server began to wait.
        deadline_s: the longest time to wait.
        roster: all parties of the recipe.
        ready: {party: labels at which it can resume; "" is the beginning}, of the joined parties.
        left: {party: labels from which the run does not need it}, of the parties that have left.
        active: the party that decides between labels that equally many offer.
        held: {party: those of its labels at which it loses nothing}, of those that would lose
            something.
    """
    missing = tuple(party for party in roster if party not in ready and party not in left)
    if not missing:
        checkpoint = newest_common(
            ready.values(), [held[party] for party in ready if party in held]
        )
        if checkpoint is None:
            label = majority_label(ready, active)
            return Refuse(
                tuple(party for party in roster if label not in ready.get(party, [label])), label
            )
        missing = tuple(
            party for party in roster if party not in ready and checkpoint not in left[party]
        )
        if not missing:
            return Begin(checkpoint)
    if waited_s < deadline_s:
        return Wait(missing, deadline_s - waited_s)
    return GiveUp(missing, f"{', '.join(missing)} did not come within {deadline_s:g} s")


def newest_common(
    offered: Collection[Sequence[str]], held: Collection[Sequence[str]] = ()
) -> str | None:
    """Returns the label to resume at, of those that every party offers; None if there is none.

    It is the newest that all hold; if there is none, the newest of those that most hold. Labels
    sort by position in the run. ``held``: the labels of each party that does not hold all that it
    offers.
    """
    common = set.intersection(*(set(labels) for labels in offered)) if offered else {""}
    holds = [set(labels) for labels in held]
    return max(
        common, key=lambda label: (sum(label in labels for labels in holds), label), default=None
    )


def majority_label(offered: Mapping[str, Sequence[str]], active: str) -> str:
    """Returns the label that most parties offer; of several, one that ``active`` offers, and of
    these the newest.
    """
    votes = Counter(label for labels in offered.values() for label in set(labels))
    return max(
        votes, key=lambda label: (votes[label], label in offered.get(active, ()), label), default=""
    )
