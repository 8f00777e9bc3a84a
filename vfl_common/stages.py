"""The stages of a run, which parties and server share: planned phases, labels of checkpoints and
plans of aggregations.

A position numbers the rounds of all phases consecutively. A checkpoint's label is
``<position>.<phase>.<round>``. The position is zero-padded, so that labels sort correctly and
parties can compare labels without knowing each other's phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from vfl_common.bundle import BundleSpec
from vfl_common.errors import Code, InputError
from vfl_common.packing.bits import derive_subseed
from vfl_common.packing.bundles import wire_spec
from vfl_common.packing.coders import PLAIN, Coding

# The purpose of a run.
Job = Literal["train", "predict"]

# The maximum number of rounds of a run, because a label has six digits for the position.
MAX_ROUNDS = 999_999
# The maximum number of labels without a checkpoint from which a party offers to resume.
MAX_OFFERED = 1000
# The maximum number of labels to which a party may skip, which take about 1 MB.
MAX_AHEAD = 50_000


@dataclass(frozen=True)
class Draw:
    """Selects ``number`` parties that take part in a round. They are drawn again every ``rounds``
    rounds.

    Every process with ``seed`` can compute the draw, so it need not be announced (decision 15).
    """

    number: int
    rounds: int
    seed: int

    def of(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns the parties that take part in a round, in the order of ``parties``."""
        return _draw(self.seed, round_ // self.rounds, self.number, tuple(parties))


# Cached, because the parties of one process ask for the same round one after the other.
@lru_cache(maxsize=64)
def _draw(seed: int, turn: int, number: int, parties: tuple[str, ...]) -> tuple[str, ...]:
    drawn = set(
        sorted(parties, key=lambda party: (derive_subseed(seed, turn, party), party))[:number]
    )
    return tuple(party for party in parties if party in drawn)


@dataclass(frozen=True)
class AggregationPlan:
    """A plan to average weights at the aggregation server: every party sends weights of ``spec``
    once per round, at batch 0.

    ``passive``: whether only the passive parties exchange weights. The active party also declares
    such a plan, because it knows the shapes. ``up`` and ``down``: the encodings of the weights and
    of the average. ``draw``: selects the parties of each round; None for all parties.
    """

    phase: str
    rounds: int
    spec: BundleSpec
    passive: bool = False
    up: Coding = PLAIN
    down: Coding = PLAIN
    draw: Draw | None = None

    def givers(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns the parties whose weights are averaged in a round."""
        return tuple(parties) if self.draw is None else self.draw.of(round_, parties)

    def takers(self, round_: int, parties: Sequence[str]) -> tuple[str, ...]:
        """Returns the parties that get the average of a round: the parties of the next round, or
        all parties after the last round.
        """
        last = round_ + 1 == self.rounds
        return tuple(parties) if last else self.givers(round_ + 1, parties)

    @property
    def sent(self) -> BundleSpec:
        """The spec of the weights as they are sent to the server."""
        return wire_spec(self.up.coder, self.spec) if self.up.coder is not None else self.spec


@dataclass(frozen=True)
class Planned:
    """A planned phase: the facts that are needed to compute the labels of its checkpoints.

    ``alone_from``: the round from which this party exchanges nothing; None if it exchanges
    something in every round. ``skippable``: the rounds that this party may skip. ``lenient``:
    whether this party may miss any round; never true at the active party.
    """

    name: str
    rounds: int
    alone_from: int | None
    skippable: tuple[int, ...] = ()
    lenient: bool = False


def list_earlier_labels(label: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the labels before ``label``, newest first, from which up to ``label`` a party
    exchanges nothing. '' is the beginning of the run.

    If the run resumes from one of them, the party can resume from ``label`` without repeating work.
    """
    name, done = parse_rounds_done(label)
    names = [phase.name for phase in plan]
    labels: list[str] = []
    for index in range(names.index(name) if name in names else -1, -1, -1):
        alone_from = plan[index].alone_from
        if alone_from is None:
            break
        begin = sum(phase.rounds for phase in plan[:index])
        labels += [
            make_label(begin + round_, plan[index].name, round_)
            for round_ in range(done - 1, max(alone_from, 1) - 1, -1)
        ]
        if alone_from > 0:
            break
        labels.append(
            make_label(begin, plan[index - 1].name, plan[index - 1].rounds) if index else ""
        )
        done = plan[index - 1].rounds
    return labels[:MAX_OFFERED]


def ahead(label: str, plan: Sequence[Planned]) -> list[str]:
    """Returns the labels after ``label``, oldest first, to which a party at ``label`` may skip."""
    position, begin, labels = parse_position(label), 0, []
    for phase in plan:
        while begin <= position < begin + phase.rounds and (
            phase.lenient or position - begin in phase.skippable
        ):
            position += 1
            labels.append(make_label(position, phase.name, position - begin))
        begin += phase.rounds
    return labels[:MAX_AHEAD]


def alone_after(label: str, plan: Sequence[Planned]) -> bool:
    """Returns whether a party exchanges nothing from ``label`` to the end of the run."""
    if not plan:
        return False
    total, last = sum(phase.rounds for phase in plan), plan[-1]
    end = make_label(total, last.name, last.rounds)
    return label == end or label in list_earlier_labels(end, plan)


def make_label(position: int, phase: str, rounds_done: int) -> str:
    """Returns the label of the checkpoint before round ``position`` of the run."""
    return f"{position:06d}.{phase}.{rounds_done}"


def parse_rounds_done(label: str) -> tuple[str, int]:
    """Returns (phase, number of its finished rounds) of a label. Raises InputError if ``label`` is
    not valid.
    """
    position, _, phase_and_rounds = label.partition(".")
    phase, _, done = phase_and_rounds.rpartition(".")
    if not (position.isdigit() and phase and done.isascii() and done.isdigit() and len(done) < 10):
        raise _invalid(label)
    return phase, int(done)


def parse_position(label: str) -> int:
    """Returns the position in a label. Raises InputError if ``label`` is not valid."""
    digits = label.partition(".")[0]
    if not digits.isdigit():
        raise _invalid(label)
    return int(digits)


def _invalid(label: str) -> InputError:
    return InputError(
        Code.CHECKPOINT_INVALID,
        f"{label[:80]!r} is not the label of a checkpoint. Give one such as 000002.splitnn.2.",
    )
