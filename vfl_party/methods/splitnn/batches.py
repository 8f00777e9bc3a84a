"""The batches of a phase of split training, which all parties know before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batch_sizes, batches
from vfl_party.methods.splitnn.exchanges import embedding
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class Batch:
    """A batch of a round: its rows, all and as the ``parts`` that are exchanged, and whether it is
    its epoch's last.

    ``first``: the number in the round of the exchange of its first part.
    """

    rows: Rows
    parts: Sequence[Rows]
    first: int
    last: bool


class Batches:
    """Computes the epochs and rounds of the phase. Raises InputError if there are no rows to train
    on.
    """

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        rows = len(party.joint_rows("train"))
        if rows == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: there are no labelled training rows. Add rows with "
                "labels to the training split.",
            )
        if settings.max_bytes is not None and not party.recipe.passives:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: max_bytes has no effect, because {party.name} is alone "
                "and exchanges nothing. Remove max_bytes, or add a passive party.",
            )
        if not settings.plain and not party.recipe.passives:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: {party.name} is alone, so nothing is exchanged. Remove "
                "in_flight, micro_batches, local_updates and cache, or add a passive party.",
            )
        swap = embedding(settings)
        chains = party.chains(phase, swap)
        crosses = [
            chain.wire_spec(sent.spec(rows=1, width=width))
            for width in party.widths.values()
            for chain, sent in ((chains.up, swap.up), (chains.down, swap.down))
        ]
        row_bytes = sum(spec.payload_bytes for spec in crosses)
        # Batch sizes are the same in every epoch.
        self._sizes = batch_sizes(rows, settings.batch_size)
        self._bytes = [row_bytes * size for size in self._sizes]
        self.epochs = settings.epochs_over(rows)
        if settings.max_bytes is not None:
            self.epochs = min(self.epochs, -(-settings.max_bytes // max(1, sum(self._bytes))))
        self._groups = -(-self.epochs // settings.validate_every)
        # The most steps of a round.
        self._stride = settings.checkpoint_steps
        # The number of rounds of a group of epochs; the last group may have fewer.
        self._parts = self._cut(len(self._group(0)))
        # The number of a group, and its steps.
        self._drawn: tuple[int, list[tuple[Rows, bool]]] = (-1, [])
        self.rounds = (self._groups - 1) * self._parts + self._cut(
            len(self._group(self._groups - 1))
        )

    def of(self, round_: int) -> list[tuple[Rows, bool]]:
        """Returns the batches of a round in order, as this party counts its own rows, each with
        whether it is its epoch's last. With ``rows.partial`` a party may hold no row of a batch.
        """
        return [(self._party.own_rows(rows), last) for rows, last in self._of(round_)]

    def _of(self, round_: int) -> list[tuple[Rows, bool]]:
        """Returns the batches of a round, as all parties count the rows."""
        group = round_ // self._parts
        if self._drawn[0] != group:
            epochs = [self._epoch(epoch)[: self._count(epoch)] for epoch in self._epochs(group)]
            steps = [
                (rows, i + 1 == len(epoch)) for epoch in epochs for i, rows in enumerate(epoch)
            ]
            self._drawn = (group, steps)
        return self._drawn[1][self._within(round_)]

    def plan(self, round_: int) -> list[Batch]:
        """Returns the batches of a round in order, each cut into ``micro_batches`` parts, the
        larger ones first.
        """
        batches, first = [], 0
        own = self._party.own_rows
        for rows, last in self._of(round_):
            parts = self._cut_up(rows)
            batches.append(Batch(own(rows), [own(part) for part in parts], first, last))
            first += len(parts)
        return batches

    def exchange_rows(self, round_: int) -> list[Rows]:
        """Returns the rows of each exchange of a round, in order, as all parties count them."""
        return [part for rows, _ in self._of(round_) for part in self._cut_up(rows)]

    def _cut_up(self, rows: Rows) -> list[Rows]:
        pieces = self._pieces(len(rows))
        return np.array_split(rows, pieces) if pieces > 1 else [rows]

    def sizes(self, round_: int) -> list[int]:
        """Returns the number of rows of each exchange of a round, in order: of each part of each
        batch.
        """
        sizes = [size for size, _ in self._group(round_ // self._parts)[self._within(round_)]]
        if self._settings.micro_batches == 1:
            return sizes
        return [
            size // n + (part < size % n)
            for size in sizes
            for n in [self._pieces(size)]
            for part in range(n)
        ]

    def validates(self, round_: int) -> bool:
        """Whether a round ends with validation: it is the last part of its epochs."""
        return (round_ + 1) % self._parts == 0 or round_ + 1 == self.rounds

    def validations(self, round_: int) -> int:
        """Returns how often there was validation before a round."""
        return round_ // self._parts

    def epochs_before(self, round_: int) -> int:
        """Returns the number of epochs that end before a round."""
        group = round_ // self._parts
        before = self._group(group)[: self._within(round_).start]
        return group * self._settings.validate_every + sum(last for _, last in before)

    def _pieces(self, rows: int) -> int:
        """Returns the number of parts of a batch: none of them is empty."""
        return min(self._settings.micro_batches, rows)

    def _cut(self, steps: int) -> int:
        """Returns the number of rounds for ``steps`` steps."""
        return max(1, -(-steps // self._stride))

    def _within(self, round_: int) -> slice:
        """Returns which steps of its group of epochs a round has."""
        begin = round_ % self._parts * self._stride
        return slice(begin, begin + self._stride)

    def _group(self, group: int) -> list[tuple[int, bool]]:
        """Returns the size of each batch of ``validate_every`` epochs, each with whether it is its
        epoch's last.
        """
        epochs = [self._sizes[: self._count(epoch)] for epoch in self._epochs(group)]
        return [(size, i + 1 == len(sizes)) for sizes in epochs for i, size in enumerate(sizes)]

    def _epochs(self, group: int) -> range:
        begin = group * self._settings.validate_every
        return range(begin, min(begin + self._settings.validate_every, self.epochs))

    def _count(self, epoch: int) -> int:
        """Returns how many batches of an epoch begin before ``max_bytes`` have crossed."""
        max_bytes = self._settings.max_bytes
        if max_bytes is None:
            return len(self._sizes)
        before = accumulate(self._bytes, initial=epoch * sum(self._bytes))
        return sum(sent < max_bytes for sent, _ in zip(before, self._bytes, strict=False))

    def _epoch(self, epoch: int) -> list[Rows]:
        rows = self._party.joint_rows("train")
        return batches(self._party.recipe.seed, self._phase, epoch, rows, self._settings.batch_size)
