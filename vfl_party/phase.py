"""Phase: one stage of a method, on one side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

Tree = Any  # nested dicts and lists of tensors, numbers, strings, None: what vfl_party.checkpoint packs


@dataclass(frozen=True)
class RoundReport:
    """What one round came to.

    ``metrics``: {split: {name: value}}, from the side that has labels; ``done``: the phase ends with this round (the
    same on all sides); ``kept``: the metrics of the weights that the phase ends with, where those are an earlier
    round's; ``note``: a sentence for people; ``checkpoint``: one is written now, whatever ``run.checkpoint_every`` says
    (the same on all sides); ``without``: parties whose data the model was trained without, as they came too late.
    """

    steps: int
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    done: bool = False
    kept: dict[str, dict[str, float]] | None = None
    note: str = ""
    checkpoint: bool = False
    without: tuple[str, ...] = ()


class Phase(ABC):
    """One side of one stage. The runner calls ``run_round`` for round 0, 1, … and writes a checkpoint after each.

    A phase gives and takes its whole state (optimizer, schedule, generators, queues, the best weights so far), so
    that a run that goes on from a checkpoint ends with the parameters that an uninterrupted run would have had. The
    parameters of the party's models and torch's own generators are the job's: see ``vfl_party.runner.Job``.
    """

    name: str  # of the phase in the recipe: part of every step key, of checkpoints' labels and of the ledger
    rounds: int  # planned
    # The round from which on this side exchanges nothing. It need not repeat those rounds because another party has to;
    # where no phase follows, a passive party is not needed any more; and as the others may be at work on their own too,
    # the next exchange waits as long as they live, whatever ``run.step_timeout_s`` says.
    alone_from: int | None = None

    # Rounds that leave this side as it was: what they do is at the peers, and in their checkpoints. Where the run goes
    # on from behind such a round, because the peers hold what came of it, this side need not run it (again).
    skippable: tuple[int, ...] = ()

    @abstractmethod
    def run_round(self, round_: int) -> RoundReport:
        """One round. Raises InterruptedRun, PeerError, LostError as Link and Hub do."""

    def state(self) -> Tree:
        """Everything that the next round depends on, beyond the models."""
        return {}

    def load_state(self, tree: Tree) -> None:
        """Takes what ``state`` gave."""
        _ = tree

    def finish(self) -> None:  # noqa: B027 - most phases have nothing to do
        """Called once after the last round, before the next phase."""
