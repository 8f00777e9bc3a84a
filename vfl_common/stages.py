"""The course of a run, shared by parties and server: planned phases, labels of checkpoints,
averaged weights.

A position numbers the rounds of all phases in a row. A checkpoint's label is
``<position>.<phase>.<round>`` with the position zero-padded, so that labels sort, and parties can
compare labels without knowing each other's phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from vfl_common.bundle import BundleSpec
from vfl_common.errors import Code, InputError
from vfl_common.packing.bundles import wire_spec
from vfl_common.packing.coding import PLAIN, Coding
from vfl_common.packing.dither import derive

# What server and parties come together for.
Job = Literal["train", "predict"]

# Of a run: a label has six digits for the position.
MOST_ROUNDS = 999_999
# Labels of rounds that have no checkpoint.
MOST_OFFERED = 1000
# Of them, if a party may skip to any: about 1 MB.
MOST_AHEAD = 50_000


@dataclass(frozen=True)
class Draw:
    """Which parties take part in a round: ``number`` of them, drawn anew every ``rounds`` rounds.

    All who know ``seed`` know who it is, so nobody has to say it (decision 38).
    """

    number: int
    rounds: int
    seed: int

    def of(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns those of ``parties`` who take part in a round, in their order."""
        return _drawn(self.seed, round_ // self.rounds, self.number, tuple(parties))


# Parties of one process ask for the same round one after the other.
@lru_cache(maxsize=64)
def _drawn(seed: int, turn: int, number: int, parties: tuple[str, ...]) -> tuple[str, ...]:
    first = set(sorted(parties, key=lambda party: (derive(seed, turn, party), party))[:number])
    return tuple(party for party in parties if party in first)


@dataclass(frozen=True)
class AggregationPlan:
    """The weights that every party swaps with the aggregation server: by ``spec``, once a round, at
    batch 0.

    ``passive``: only the passive parties do; the active party declares it too, as it knows the
    shapes. ``up`` and ``down``: how the weights, and the average, are written. ``draw``: who takes
    part in which round; None: all in each.
    """

    phase: str
    rounds: int
    spec: BundleSpec
    passive: bool = False
    up: Coding = PLAIN
    down: Coding = PLAIN
    draw: Draw | None = None

    def givers(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns those of ``parties`` whose weights the average of a round is made of."""
        return tuple(parties) if self.draw is None else self.draw.of(round_, parties)

    def takers(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns those who get the average of a round: those of the next one; after the last
        round, all.
        """
        last = round_ + 1 == self.rounds
        return tuple(parties) if last else self.givers(round_ + 1, parties)

    @property
    def sent(self) -> BundleSpec:
        """The weights as they cross, up."""
        return wire_spec(self.up.coder, self.spec) if self.up.coder is not None else self.spec


@dataclass(frozen=True)
class Planned:
    """A phase before it is made: the facts that give its checkpoints' labels a meaning.

    ``lenient``: this side may miss any rounds of it; never true at the active party.
    """

    name: str
    rounds: int
    alone_from: int | None
    skippable: tuple[int, ...] = ()
    lenient: bool = False


def reachable(label: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the earlier labels, newest first, since which a party at ``label`` was alone; '' is
    the run's beginning.

    If the run resumes from one of them, the party resumes from ``label``: it repeats nothing.
    """
    name, done = rounds_done(label)
    names = [phase.name for phase in plan]
    found: list[str] = []
    for at in range(names.index(name) if name in names else -1, -1, -1):
        free = plan[at].alone_from
        if free is None:
            break
        begin = sum(phase.rounds for phase in plan[:at])
        found += [
            label_of(begin + round_, plan[at].name, round_)
            for round_ in range(done - 1, max(free, 1) - 1, -1)
        ]
        if free > 0:
            break
        found.append(label_of(begin, plan[at - 1].name, plan[at - 1].rounds) if at else "")
        done = plan[at - 1].rounds
    return found[:MOST_OFFERED]


def ahead(label: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the later labels, oldest first, to which a party at ``label`` may skip."""
    position, begin, found = position_of(label), 0, []
    for phase in plan:
        while begin <= position < begin + phase.rounds and (
            phase.lenient or position - begin in phase.skippable
        ):
            position += 1
            found.append(label_of(position, phase.name, position - begin))
        begin += phase.rounds
    return found[:MOST_AHEAD]


def alone_after(label: str, plan: Sequence[Planned]) -> bool:
    """Returns whether a party exchanges nothing from ``label`` to the end of the run."""
    if not plan:
        return False
    total, last = sum(phase.rounds for phase in plan), plan[-1]
    end = label_of(total, last.name, last.rounds)
    return label == end or label in reachable(end, plan)


def label_of(position: int, phase: str, rounds_done: int) -> str:
    """Returns the label of the checkpoint after which round ``position`` of the run is next."""
    return f"{position:06d}.{phase}.{rounds_done}"


def rounds_done(label: str) -> tuple[str, int]:
    """Returns (phase, its finished rounds) of a label. Raises InputError if ``label`` is no
    label.
    """
    position, _, rest = label.partition(".")
    phase, _, done = rest.rpartition(".")
    if not (position.isdigit() and phase and done.isascii() and done.isdigit() and len(done) < 10):
        raise InputError(
            Code.CHECKPOINT_INVALID, f"{label[:80]!r} is not the label of a checkpoint"
        )
    return phase, int(done)


def position_of(label: str) -> int:
    """Returns the position in a label. Raises InputError if ``label`` is no label."""
    head = label.partition(".")[0]
    if not head.isdigit():
        raise InputError(
            Code.CHECKPOINT_INVALID, f"{label[:80]!r} is not the label of a checkpoint"
        )
    return int(head)
