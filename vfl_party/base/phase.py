"""Defines the interface of a phase: one stage of a method at one party."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vfl_common.summary import Absence, Worth
from vfl_party.base.seeds import Rows

# A state for vfl_party.base.checkpoint: nested dicts and lists of tensors, numbers, strings, None.
Tree = Any
# For each split, its rows [N] and the model's outputs for them [N, O].
Predictions = Mapping[str, tuple[Rows, Tensor]]


@dataclass(frozen=True)
class RoundReport:
    """The result of one round.

    Args:
        steps: The number of steps in the round.
        metrics: For each split, its metrics by name, at the party with labels.
        done: Whether the phase ends with this round. The same at all parties, except in a phase
            in which this party is alone.
        kept: The metrics of the final weights, if the phase ends with the weights of an earlier
            round.
        note: A sentence for people.
        checkpoint: Whether to write a checkpoint now, regardless of ``run.checkpoint_every``.
            The same at all parties.
        without: The parties that the model was trained without, because their data came too
            late.
        absences: All steps of the phase so far that were computed without a party.
        predictions: The predictions behind the metrics of a trained model. They stay in this
            party's folder and are never sent.
        drift: For each party, how far its embeddings have moved since the last validation. It
            stays in this party's ``metrics.jsonl``.
        passed: The number of steps that the other parties computed without this party.
        judged: The validation metric by which the phase ends; '' if there is none.
        worth: The quality of each set of parties, at the party with labels.
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
    """One stage of a method at one party. A run calls ``run_round`` for round 0, 1, … and writes a
    checkpoint after each round.

    ``state`` returns the whole state of a phase (optimizer, schedule, generators, queues, the best
    weights so far), so that a resumed run ends with the same parameters as an uninterrupted run.
    The parameters of the party's models and torch's global generators are saved by
    ``vfl_party.runtime.generation.Generation``.
    """

    # The name in the recipe; part of every step key, checkpoint label and ledger entry.
    name: str
    # The planned number of rounds.
    rounds: int
    # The number of passes over the training rows, which a policy may limit. None means ``epochs``
    # of the settings, or the number of rounds.
    epochs: int | None = None
    # The first round from which this party sends and receives nothing more in this phase; None if
    # there is none. From then on, (1) this party keeps its results when other parties roll back,
    # (2) a passive party may leave if no phase follows, (3) the next exchange has no step timeout,
    # because the other parties may also be working alone.
    alone_from: int | None = None

    # Rounds that change nothing at this party, such as an upload. Only the peers and their
    # checkpoints have the result, so a resumed run skips such a round if a peer has it.
    skippable: tuple[int, ...] = ()

    # Whether the phase continues without a passive party that is late or away, and lets this party
    # resume at any later round of the phase (``vfl_common.bundle.Lenience``).
    lenient: bool = False

    @abstractmethod
    def run_round(self, round_: int) -> RoundReport:
        """Runs one round. Raises InterruptedRun, PeerError, LostError as Link and Hub do."""

    def state(self) -> Tree:
        """Returns the state on which the next round depends, without the models."""
        return {}

    def load_state(self, tree: Tree) -> None:
        """Restores the state that ``state`` returned."""
        _ = tree

    def keep(self, folder: Path) -> None:  # noqa: B027 - most phases keep nothing
        """Receives the party's folder of the run. Called before the phases of a training run begin.

        When a run rolls back to an earlier checkpoint, the state of the phase rolls back too. A
        phase can save data that must not roll back in this folder.
        """

    def close(self) -> None:  # noqa: B027 - most phases have nothing to end
        """Releases the resources of the rounds, such as processes. Called after the last round and
        after an error.
        """

    def finish(self) -> None:  # noqa: B027 - most phases have nothing to do
        """Does final work of the phase. Called once, after the last round and before the next
        phase.
        """
