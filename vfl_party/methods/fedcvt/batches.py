"""The batches of a FedCVT phase. Both parties have the same batches of aligned rows, which are
known before the phase begins.
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

    ``last``: whether the step is the last of its epoch. ``pseudo``: whether rows may get
    pseudo-labels.
    """

    labelled: Rows
    unlabelled: Rows
    own: Rows
    last: bool
    pseudo: bool

    @property
    def aligned(self) -> int:
        """The number of aligned rows in the step."""
        return len(self.labelled) + len(self.unlabelled)

    @property
    def rows(self) -> Rows:
        """All rows of the step, in the order of their representations."""
        return np.concatenate([self.labelled, self.unlabelled, self.own])


class BatchCycle:
    """Yields full batches of some rows, step after step, and reshuffles the rows when all are
    used.
    """

    def __init__(self, seed: int, label: str, rows: Rows, size: int) -> None:
        self._seed, self._label, self._rows, self.size = seed, label, rows, size
        self._drawn: tuple[int, list[Rows]] = (-1, [])

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def is_too_short(self) -> bool:
        """Whether there are fewer rows than a batch needs."""
        return self.size > self.count

    def get_batch(self, step: int) -> Rows:
        """Returns the batch of a step, numbered through the phase."""
        if not self.size:
            return self._rows[:0]
        cycle, place = divmod(step, self.count // self.size)
        if self._drawn[0] != cycle:
            self._drawn = (
                cycle,
                full_batches(self._seed, self._label, cycle, self._rows, self.size),
            )
        return self._drawn[1][place]


class FedCVTBatches:
    """Computes the epochs and rounds of a phase and the batches of their steps. Raises InputError
    if there are too few aligned rows.
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
        # The sizes of the batches are the same in every epoch.
        self._sizes = [len(rows) for rows in self._make_epoch(0)]

    @property
    def min_step_rows(self) -> int:
        """The number of aligned rows in the smallest step."""
        return min(self._sizes) + self._settings.unlabelled_batch_size

    def get_round_epochs(self, round_: int) -> range:
        """Returns the epochs of a round."""
        begin = round_ * self._settings.validate_every
        return range(begin, min(begin + self._settings.validate_every, self.epochs))

    def get_step_sizes(self, round_: int) -> list[int]:
        """Returns the number of aligned rows of each step of a round, in order."""
        return [
            size + self._settings.unlabelled_batch_size
            for _ in self.get_round_epochs(round_)
            for size in self._sizes
        ]

    def get_round_steps(self, round_: int, own: BatchCycle) -> list[CrossViewStep]:
        """Returns the steps of a round, in order. ``own``: the batches of rows that only this party
        has.
        """
        steps = []
        for epoch in self.get_round_epochs(round_):
            for batch, rows in enumerate(self._make_epoch(epoch)):
                step, last = epoch * len(self._sizes) + batch, batch + 1 == len(self._sizes)
                steps.append(
                    CrossViewStep(
                        rows,
                        self._unlabelled.get_batch(step),
                        own.get_batch(step),
                        last,
                        epoch >= self._warmup,
                    )
                )
        return steps

    def _make_epoch(self, epoch: int) -> list[Rows]:
        return batches(self._seed, self._phase, epoch, self._labelled, self._settings.batch_size)


def make_own_cycle(party: Party, phase: str, settings: FedCVTSettings) -> BatchCycle:
    """Returns the batches of training rows that only this party has, in an order that only it
    knows.

    Raises InputError if there are fewer rows than a batch needs. With ``rows.align = "psi"`` these
    rows are unknown until the parties have joined, so the check comes in the first round.
    """
    rows = np.setdiff1d(party.rows("local"), party.rows("aligned"))
    seed, size = derive_seed(party.own_seed, party.name), settings.get_own_batch_size(party.role)
    cycle = BatchCycle(seed, f"{phase} own", rows, size)
    if cycle.is_too_short and party.recipe.rows.align != "psi":
        raise make_shortage_error(party, phase, cycle)
    return cycle


def make_shortage_error(party: Party, phase: str, own: BatchCycle) -> InputError:
    """Returns the error for a party that has fewer rows of its own than a step uses."""
    other = "passive" if party.role == "active" else "active"
    return InputError(
        Code.CONFIG_INVALID,
        f"recipe: phases: {phase}: own_batch_size must be at most {own.count}, the number of "
        f"training rows that only {party.name} has (got {own.size}). Set a smaller own_batch_size "
        f'(0 uses none), or set own_rows = "{other}" if that party has more.',
    )
