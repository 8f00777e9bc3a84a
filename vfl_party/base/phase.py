"""Phase: one stage of a method, on one side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vfl_common.summary import Absence, Worth
from vfl_party.base.seeds import Rows

# Nested dicts and lists of tensors, numbers, strings, None: what vfl_party.base.checkpoint packs.
Tree = Any
# {split: (its rows [N], the outputs for them [N, O])}.
Predictions = Mapping[str, tuple[Rows, Tensor]]


@dataclass(frozen=True)
class RoundReport:
    """The result of one round.

    ``metrics``: {split: {name: value}}, from the side that has labels; ``done``: the phase ends
    with this round (the same on all sides, but for a side that is alone in it); ``kept``: the
    metrics of the weights that the phase ends with, if these are an earlier round's; ``note``: a
    sentence for people; ``checkpoint``: one is written now, whatever ``run.checkpoint_every`` says
    (the same on all sides); ``without``: parties that the model was trained without, because their
    data came too late; ``absences``: all steps of the phase so far that were computed without a
    party; ``predictions``: those behind the metrics of a trained model, which this party keeps in
    its folder and never sends; ``drift``: {party: how far its embeddings have moved since the
    validation before}, which stays in this party's ``metrics.jsonl``; ``passed``: steps that the
    others computed without this party; ``judged``: the metric of the validation rows by which the
    phase ends; '' if by none; ``worth``: the quality of each set of parties, from the side that has
    labels.
    """

    steps: int
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    done: bool = False
    kept: dict[str, dict[str, float]] | None = None
    note: str = ""
    checkpoint: bool = False
    without: tuple[str, ...] = ()
    absences: tuple[Absence, ...] = ()
    predictions: Predictions = field(default_factory=dict)
    drift: Mapping[str, float] = field(default_factory=dict)
    passed: int = 0
    judged: str = ""
    worth: Worth | None = None


class Phase(ABC):
    """One side of one stage. A run calls ``run_round`` for round 0, 1, … and writes a
    checkpoint after each.

    A phase returns and restores its whole state (optimizer, schedule, generators, queues, the best
    weights so far). So a resumed run ends with the same parameters as an uninterrupted one. The
    generation keeps the parameters of the party's models and torch's own generators: see
    ``vfl_party.runtime.generation.Generation``.
    """

    # In the recipe; part of every step key, checkpoint label and ledger entry.
    name: str
    # The planned number of rounds.
    rounds: int
    # Passes over the training rows, as a policy limits them. None: ``epochs`` of the settings, or
    # the rounds.
    epochs: int | None = None
    # First round from which this side sends and receives nothing in this phase; None if there is
    # none. So (1) it keeps its results when others roll back, (2) a passive party may leave if no
    # phase follows, (3) the next exchange has no step timeout, because the others may also be at
    # work on their own.
    alone_from: int | None = None

    # Rounds that change nothing on this side (an upload, say): their result is at the peers, and in
    # their checkpoints. On resume this side skips such a round if the peers' checkpoints hold the
    # result.
    skippable: tuple[int, ...] = ()

    # The phase goes on without a passive party that is late or away, and takes it back
    # (``vfl_common.link.Lenience``). So a passive party may resume at any later round of the phase.
    lenient: bool = False

    @abstractmethod
    def run_round(self, round_: int) -> RoundReport:
        """Runs one round. Raises InterruptedRun, PeerError, LostError as Link and Hub do."""

    def state(self) -> Tree:
        """Returns everything that the next round depends on, beyond the models."""
        return {}

    def load_state(self, tree: Tree) -> None:
        """Restores what ``state`` returned."""
        _ = tree

    def keep(self, folder: Path) -> None:  # noqa: B027 - most phases keep nothing
        """Names the party's folder of the run, which outlives generations; called before a training
        run's phases run.

        Checkpoints go back with the run. What must not be forgotten then is kept here.
        """

    def close(self) -> None:  # noqa: B027 - most phases have nothing to end
        """Ends what the rounds have started, such as processes; called when they are over, whatever
        has ended them.
        """

    def finish(self) -> None:  # noqa: B027 - most phases have nothing to do
        """Does what is due once, after the last round and before the next phase."""
