"""The course of a run, as parties and server speak of it: planned phases, labels of checkpoints, what is averaged.

Positions. The rounds of all phases are numbered through: a checkpoint's label is ``<position>.<phase>.<round>`` with
the position zero-padded, so that labels sort, and parties compare labels without knowing each other's phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vfl_common.bundle import BundleSpec
from vfl_common.errors import Code, InputError

MOST_ROUNDS = 999_999  # of a run: the labels of its checkpoints have six digits for them
MOST_OFFERED = 1000  # labels of rounds without a checkpoint of their own


@dataclass(frozen=True)
class AggregationPlan:
    """What every party swaps with the aggregation server: weights as ``spec`` says, once a round, at batch 0."""

    phase: str
    rounds: int
    spec: BundleSpec


@dataclass(frozen=True)
class Planned:
    """A phase before it is made: what the labels of its checkpoints mean."""

    name: str
    rounds: int
    alone_from: int | None
    skippable: tuple[int, ...] = ()


def reachable(label: str, plan: Sequence[Planned]) -> list[str]:
    """Earlier labels, the newest first, from which a party at ``label`` was alone; '' is the beginning of the run.

    Where the run goes on from one of them, the party goes on from ``label``: nobody waits for what it did in between.
    """
    name, done = rounds_done(label)
    names = [phase.name for phase in plan]
    found: list[str] = []
    for at in range(names.index(name) if name in names else -1, -1, -1):
        free = plan[at].alone_from
        if free is None:
            break
        begin = sum(phase.rounds for phase in plan[:at])
        found += [label_of(begin + round_, plan[at].name, round_) for round_ in range(done - 1, max(free, 1) - 1, -1)]
        if free > 0:
            break
        found.append(label_of(begin, plan[at - 1].name, plan[at - 1].rounds) if at else "")
        done = plan[at - 1].rounds
    return found[:MOST_OFFERED]


def ahead(label: str, plan: Sequence[Planned]) -> list[str]:
    """Later labels, the oldest first, to which a party at ``label`` may skip."""
    position, begin, found = position_of(label), 0, []
    for phase in plan:
        while begin <= position < begin + phase.rounds and position - begin in phase.skippable:
            position += 1
            found.append(label_of(position, phase.name, position - begin))
        begin += phase.rounds
    return found


def alone_after(label: str, plan: Sequence[Planned]) -> bool:
    """Whether a party exchanges nothing from ``label`` on to the end of the run."""
    if not plan:
        return False
    total, last = sum(phase.rounds for phase in plan), plan[-1]
    end = label_of(total, last.name, last.rounds)
    return label == end or label in reachable(end, plan)


def label_of(position: int, phase: str, rounds_done: int) -> str:
    """The label of the checkpoint after which round number ``position`` of the run is next."""
    return f"{position:06d}.{phase}.{rounds_done}"


def rounds_done(label: str) -> tuple[str, int]:
    """(phase, rounds of it that are done) of a label. Raises InputError where ``label`` is no label."""
    position, _, rest = label.partition(".")
    phase, _, done = rest.rpartition(".")
    if not (position.isdigit() and phase and done.isascii() and done.isdigit() and len(done) < 10):
        raise InputError(Code.CHECKPOINT_INVALID, f"{label[:80]!r} is not the label of a checkpoint")
    return phase, int(done)


def position_of(label: str) -> int:
    """The inverse of ``label_of``. Raises InputError where ``label`` is no label."""
    head = label.partition(".")[0]
    if not head.isdigit():
        raise InputError(Code.CHECKPOINT_INVALID, f"{label[:80]!r} is not the label of a checkpoint")
    return int(head)
