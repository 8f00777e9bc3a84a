"""The stages of a run, shared by parties and server: planned phases, labels of checkpoints,
averaged weights.

A position numbers the rounds of all phases consecutively. A checkpoint's label is
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

# The purpose of a run.
Job = Literal["train", "predict"]

# The most rounds of a run: a label has six digits for the position.
MAX_ROUNDS = 999_999
# The most labels without a checkpoint that a party offers to resume at.
MAX_OFFERED = 1000
# The most labels that a party may skip to: about 1 MB.
MAX_AHEAD = 50_000


@dataclass(frozen=True)
class Draw:
    """Selects the parties that take part in a round: ``number`` of them, drawn again every
    ``rounds`` rounds.

    Everybody with ``seed`` can compute them, so they need not be announced (decision 38).
    """

    number: int
    rounds: int
    seed: int

    def of(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns those of ``parties`` that take part in a round, in their order."""
        return _draw(self.seed, round_ // self.rounds, self.number, tuple(parties))


# Cached, because the parties of one process ask for the same round one after the other.
@lru_cache(maxsize=64)
def _draw(seed: int, turn: int, number: int, parties: tuple[str, ...]) -> tuple[str, ...]:
    first = set(sorted(parties, key=lambda party: (derive(seed, turn, party), party))[:number])
    return tuple(party for party in parties if party in first)


@dataclass(frozen=True)
class AggregationPlan:
    """The weights that every party exchanges with the aggregation server: by ``spec``, once per
    round, at batch 0.

    ``passive``: only the passive parties exchange them; the active party declares the plan, too,
    because it knows the shapes. ``up`` and ``down``: the encodings of the weights and of the
    average. ``draw``: selects the parties of each round; None: all in each.
    """

    phase: str
    rounds: int
    spec: BundleSpec
    passive: bool = False
    up: Coding = PLAIN
    down: Coding = PLAIN
    draw: Draw | None = None

    def givers(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns those of ``parties`` whose weights enter the average of a round."""
        return tuple(parties) if self.draw is None else self.draw.of(round_, parties)

    def takers(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns those of ``parties`` that get the average of a round: those of the next round,
        and all after the last round.
        """
        last = round_ + 1 == self.rounds
        return tuple(parties) if last else self.givers(round_ + 1, parties)

    @property
    def sent(self) -> BundleSpec:
        """The spec of the weights as they are sent to the server."""
        return wire_spec(self.up.coder, self.spec) if self.up.coder is not None else self.spec


@dataclass(frozen=True)
class Planned:
    """A phase before it is created: the facts that its checkpoints' labels refer to.

    ``alone_from``: the round from which this party exchanges nothing; None: it always does.
    ``lenient``: this party may miss any rounds of it; never true at the active party.
    """

    name: str
    rounds: int
    alone_from: int | None
    skippable: tuple[int, ...] = ()
    lenient: bool = False


def reachable(label: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the earlier labels, newest first, after which a party at ``label`` has exchanged
    nothing; '' is the beginning of the run.

    If the run resumes from one of them, the party resumes from ``label``, and repeats nothing.
    """
    name, done = rounds_done(label)
    names = [phase.name for phase in plan]
    labels: list[str] = []
    for at in range(names.index(name) if name in names else -1, -1, -1):
        free = plan[at].alone_from
        if free is None:
            break
        begin = sum(phase.rounds for phase in plan[:at])
        labels += [
            label_of(begin + round_, plan[at].name, round_)
            for round_ in range(done - 1, max(free, 1) - 1, -1)
        ]
        if free > 0:
            break
        labels.append(label_of(begin, plan[at - 1].name, plan[at - 1].rounds) if at else "")
        done = plan[at - 1].rounds
    return labels[:MAX_OFFERED]


def ahead(label: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the later labels, oldest first, to which a party at ``label`` may skip."""
    position, begin, labels = position_of(label), 0, []
    for phase in plan:
        while begin <= position < begin + phase.rounds and (
            phase.lenient or position - begin in phase.skippable
        ):
            position += 1
            labels.append(label_of(position, phase.name, position - begin))
        begin += phase.rounds
    return labels[:MAX_AHEAD]


def alone_after(label: str, plan: Sequence[Planned]) -> bool:
    """Returns whether a party exchanges nothing from ``label`` to the end of the run."""
    if not plan:
        return False
    total, last = sum(phase.rounds for phase in plan), plan[-1]
    end = label_of(total, last.name, last.rounds)
    return label == end or label in reachable(end, plan)


def label_of(position: int, phase: str, rounds_done: int) -> str:
    """Returns the label of the checkpoint before round ``position`` of the run."""
    return f"{position:06d}.{phase}.{rounds_done}"


def rounds_done(label: str) -> tuple[str, int]:
    """Returns (phase, its finished rounds) of a label. Raises InputError if ``label`` is "
    "invalid."""
    position, _, rest = label.partition(".")
    phase, _, done = rest.rpartition(".")
    if not (position.isdigit() and phase and done.isascii() and done.isdigit() and len(done) < 10):
        raise _invalid(label)
    return phase, int(done)


def position_of(label: str) -> int:
    """Returns the position in a label. Raises InputError if ``label`` is invalid."""
    head = label.partition(".")[0]
    if not head.isdigit():
        raise _invalid(label)
    return int(head)


def _invalid(label: str) -> InputError:
    return InputError(
        Code.CHECKPOINT_INVALID,
        f"{label[:80]!r} is not the label of a checkpoint. Give one such as 000002.splitnn.2.",
    )
