"""Decides whether a run may begin, and at which checkpoint. Pure functions of the joined parties
and the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Begin:
    """Decision to start a generation from ``checkpoint``, because all needed parties have joined.
    An empty label means the beginning of the run.
    """

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Decision to wait: the parties in ``missing`` have ``left_s`` seconds to join."""

    missing: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decision to refuse the parties in ``lacking``: most parties can resume at ``label``, and
    these parties cannot.
    """

    lacking: tuple[str, ...]
    label: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to end the run: the parties in ``missing`` did not join in time."""

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

    A party offers ``""``, the run's beginning, only if it has made at most the progress that a
    crash can lose. So a party that lost checkpoints cannot make the other parties start again: it
    is refused.

    Args:
        waited_s: The time since the server began to wait.
        deadline_s: The maximum time to wait.
        roster: All parties of the recipe.
        ready: {party: labels at which it can resume} for the joined parties; "" is the beginning.
        left: {party: labels from which the run does not need it} for the parties that have left.
        active: The party that decides between labels that equally many parties offer.
        held: {party: the labels at which it loses no work} for the parties that lose work at some
            of their labels.
    """
    missing = tuple(party for party in roster if party not in ready and party not in left)
    if not missing:
        checkpoint = find_newest_common(
            ready.values(), [held[party] for party in ready if party in held]
        )
        if checkpoint is None:
            label = find_majority_label(ready, active)
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


def find_newest_common(
    offered: Collection[Sequence[str]], held: Collection[Sequence[str]] = ()
) -> str | None:
    """Returns the label to resume at. Every party offers this label. Returns None if the parties
    offer no common label.

    Of the common labels, the label at which most parties lose no work is chosen; of several, the
    newest. Labels sort by position in the run. ``held``: For each party that loses work at some
    label, the labels at which it loses no work.
    """
    common = set.intersection(*(set(labels) for labels in offered)) if offered else {""}
    label_sets = [set(labels) for labels in held]
    return max(
        common,
        key=lambda label: (sum(label in labels for labels in label_sets), label),
        default=None,
    )


def find_majority_label(offered: Mapping[str, Sequence[str]], active: str) -> str:
    """Returns the label that most parties offer. Of several such labels, prefers a label that
    ``active`` offers, then the newest.
    """
    votes = Counter(label for labels in offered.values() for label in set(labels))
    return max(
        votes, key=lambda label: (votes[label], label in offered.get(active, ()), label), default=""
    )
