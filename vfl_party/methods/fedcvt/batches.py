"""The batches of a phase of FedCVT. Batches of aligned rows are the same at both parties and known
before the phase begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batches, derive_seed, full_batches
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class CrossViewStep:
    """The rows of one step at one party.

    ``last``: whether it is its epoch's last; ``pseudo``: whether rows may get pseudo-labels.
    """

    labelled: Rows
    unlabelled: Rows
    own: Rows
    last: bool
    pseudo: bool

    @property
    def aligned(self) -> int:
        """The number of aligned rows."""
        return len(self.labelled) + len(self.unlabelled)

    @property
    def rows(self) -> Rows:
        """All rows, in the order of their representations."""
        return np.concatenate([self.labelled, self.unlabelled, self.own])


class BatchCycle:
    """Full batches of some rows, step after step; the rows are reshuffled when they are used up."""

    def __init__(self, seed: int, label: str, rows: Rows, size: int) -> None:
        self._seed, self._label, self._rows, self.size = seed, label, rows, size
        self._drawn: tuple[int, list[Rows]] = (-1, [])

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def short(self) -> bool:
        """Whether the rows are fewer than a batch."""
        return self.size > self.count

    def at(self, step: int) -> Rows:
        """Returns the batch of a step, numbered through the phase."""
        if not self.size:
            return self._rows[:0]
        turn, place = divmod(step, self.count // self.size)
        if self._drawn[0] != turn:
            self._drawn = (turn, full_batches(self._seed, self._label, turn, self._rows, self.size))
        return self._drawn[1][place]


class FedCVTBatches:
    """Computes epochs, rounds and the sizes of their steps. Raises InputError if there are too few
    aligned rows.
    """

    def __init__(self, party: Party, phase: str, settings: FedCVTSettings) -> None:
        self._seed, self._phase, self._settings = party.recipe.seed, phase, settings
        self._labelled = party.rows("train")
        if len(self._labelled) == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: there are no labelled training rows. Add rows with "
                "labels to the training split.",
            )
        unlabelled, size = (
            np.setdiff1d(party.rows("aligned"), self._labelled),
            settings.unlabelled_batch_size,
        )
        if size > len(unlabelled):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: unlabelled_batch_size must be at most the number of "
                f"aligned training rows without labels, {len(unlabelled)} (got {size}). Set a "
                "smaller unlabelled_batch_size.",
            )
        self._unlabelled = BatchCycle(self._seed, f"{phase} unlabelled", unlabelled, size)
        self.epochs = settings.epochs_over(len(self._labelled))
        self.rounds = -(-self.epochs // settings.validate_every)
        self._warmup = int(self.epochs * settings.warmup)
        # The same in every epoch.
        self._sizes = [len(rows) for rows in self._epoch(0)]

    @property
    def min_step_rows(self) -> int:
        """The number of aligned rows of the smallest step."""
        return min(self._sizes) + self._settings.unlabelled_batch_size

    def epochs_of(self, round_: int) -> range:
        """Returns the epochs of a round."""
        begin = round_ * self._settings.validate_every
        return range(begin, min(begin + self._settings.validate_every, self.epochs))

    def sizes(self, round_: int) -> list[int]:
        """Returns the number of aligned rows of each step of a round, in order."""
        return [
            size + self._settings.unlabelled_batch_size
            for _ in self.epochs_of(round_)
            for size in self._sizes
        ]

    def of(self, round_: int, own: BatchCycle) -> list[CrossViewStep]:
        """Returns the steps of a round, in order. ``own``: this party's own rows."""
        steps = []
        for epoch in self.epochs_of(round_):
            for batch, rows in enumerate(self._epoch(epoch)):
                step, last = epoch * len(self._sizes) + batch, batch + 1 == len(self._sizes)
                steps.append(
                    CrossViewStep(
                        rows, self._unlabelled.at(step), own.at(step), last, epoch >= self._warmup
                    )
                )
        return steps

    def _epoch(self, epoch: int) -> list[Rows]:
        return batches(self._seed, self._phase, epoch, self._labelled, self._settings.batch_size)


def own_rows(party: Party, phase: str, settings: FedCVTSettings) -> BatchCycle:
    """Returns the batches of training rows that only this party has, in its own order.

    Raises InputError if there are fewer rows than a batch. With ``rows.align = "psi"`` these rows
    are unknown until the parties have joined, so the first round raises ``too_few_error``.
    """
    rows = np.setdiff1d(party.rows("local"), party.rows("aligned"))
    seed, size = derive_seed(party.own_seed, party.name), settings.own_batch(party.role)
    cycle = BatchCycle(seed, f"{phase} own", rows, size)
    if cycle.short and party.recipe.rows.align != "psi":
        raise too_few_error(party, phase, cycle)
    return cycle


def too_few_error(party: Party, phase: str, own: BatchCycle) -> InputError:
    """Returns the error for a party that has fewer own rows than a step uses."""
    other = "passive" if party.role == "active" else "active"
    return InputError(
        Code.CONFIG_INVALID,
        f"recipe: phases: {phase}: own_batch_size must be at most {own.count}, the number of "
        f"training rows that only {party.name} has (got {own.size}). Set a smaller own_batch_size "
        f'(0 uses none), or set own_rows = "{other}" if that party has more.',
    )
