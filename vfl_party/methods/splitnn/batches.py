"""Computes the batches of a split training phase, which all parties know before the phase
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batches, compute_batch_sizes
from vfl_party.methods.splitnn.exchanges import embedding
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class Batch:
    """A batch of a round. ``rows``: all its rows. ``parts``: the rows of each part that is
    exchanged. ``last``: whether the batch is the last of its epoch.

    ``first``: the number, within the round, of the exchange of the batch's first part.
    """

    rows: Rows
    parts: Sequence[Rows]
    first: int
    last: bool


class Batches:
    """Computes the epochs, rounds and batches of the phase. Raises InputError if there are no rows
    to train on.
    """

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        rows = len(party.rows.get_joint("train"))
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
        exchange = embedding(settings)
        chains = party.exchanges.make_chains(phase, exchange)
        wire_specs = [
            chain.wire_spec(sent.spec(rows=1, width=width))
            for width in party.exchanges.widths.values()
            for chain, sent in ((chains.up, exchange.up), (chains.down, exchange.down))
        ]
        row_bytes = sum(spec.payload_bytes for spec in wire_specs)
        # Batch sizes are the same in every epoch.
        self._sizes = compute_batch_sizes(rows, settings.batch_size)
        self._bytes = [row_bytes * size for size in self._sizes]
        self.epochs = settings.epochs_over(rows)
        if settings.max_bytes is not None:
            self.epochs = min(self.epochs, -(-settings.max_bytes // max(1, sum(self._bytes))))
        self._num_groups = -(-self.epochs // settings.validate_every)
        # The maximum number of steps in a round.
        self._max_round_steps = settings.checkpoint_steps
        # The number of rounds in a group of epochs between two validations. The last group may have
        # fewer.
        self._rounds_per_group = self._count_rounds(len(self._get_group_sizes(0)))
        # The number of the current group, and its batches, each with whether it is the last of its
        # epoch.
        self._drawn: tuple[int, list[tuple[Rows, bool]]] = (-1, [])
        self.rounds = (self._num_groups - 1) * self._rounds_per_group + self._count_rounds(
            len(self._get_group_sizes(self._num_groups - 1))
        )

    def of(self, round_: int) -> list[tuple[Rows, bool]]:
        """Returns the batches of a round in order, as this party's row numbers, each with whether
        it is the last of its epoch. With ``rows.partial`` a party may hold no row of a batch.
        """
        return [
            (self._party.rows.select_own(rows), last) for rows, last in self._make_round(round_)
        ]

    def _make_round(self, round_: int) -> list[tuple[Rows, bool]]:
        """Returns the batches of a round, as the row numbers that all parties share."""
        group = round_ // self._rounds_per_group
        if self._drawn[0] != group:
            epochs = [
                self._make_epoch(epoch)[: self._count_batches(epoch)]
                for epoch in self._get_group_epochs(group)
            ]
            steps = [
                (rows, position + 1 == len(epoch))
                for epoch in epochs
                for position, rows in enumerate(epoch)
            ]
            self._drawn = (group, steps)
        return self._drawn[1][self._get_round_slice(round_)]

    def plan(self, round_: int) -> list[Batch]:
        """Returns the batches of a round in order, each split into ``micro_batches`` parts, the
        larger parts first.
        """
        batches, first_exchange = [], 0
        to_own_rows = self._party.rows.select_own
        for rows, last in self._make_round(round_):
            parts = self._split_batch(rows)
            batches.append(
                Batch(
                    to_own_rows(rows), [to_own_rows(part) for part in parts], first_exchange, last
                )
            )
            first_exchange += len(parts)
        return batches

    def exchange_rows(self, round_: int) -> list[Rows]:
        """Returns the rows of each exchange of a round, in order, as the row numbers that all
        parties share.
        """
        return [part for rows, _ in self._make_round(round_) for part in self._split_batch(rows)]

    def _split_batch(self, rows: Rows) -> list[Rows]:
        pieces = self._count_parts(len(rows))
        return np.array_split(rows, pieces) if pieces > 1 else [rows]

    def sizes(self, round_: int) -> list[int]:
        """Returns the number of rows in each exchange of a round, in order. Each part of a batch is
        one exchange.
        """
        sizes = [
            size
            for size, _ in self._get_group_sizes(round_ // self._rounds_per_group)[
                self._get_round_slice(round_)
            ]
        ]
        if self._settings.micro_batches == 1:
            return sizes
        return [
            size // n + (part < size % n)
            for size in sizes
            for n in [self._count_parts(size)]
            for part in range(n)
        ]

    def validates(self, round_: int) -> bool:
        """Whether a round ends with validation, that is, whether it is the last round of its group
        of epochs.
        """
        return (round_ + 1) % self._rounds_per_group == 0 or round_ + 1 == self.rounds

    def validations(self, round_: int) -> int:
        """Returns the number of validations before a round."""
        return round_ // self._rounds_per_group

    def epochs_before(self, round_: int) -> int:
        """Returns the number of epochs that end before a round."""
        group = round_ // self._rounds_per_group
        earlier_steps = self._get_group_sizes(group)[: self._get_round_slice(round_).start]
        return group * self._settings.validate_every + sum(last for _, last in earlier_steps)

    def _count_parts(self, rows: int) -> int:
        """Returns the number of parts of a batch, none of which is empty."""
        return min(self._settings.micro_batches, rows)

    def _count_rounds(self, steps: int) -> int:
        """Returns the number of rounds for ``steps`` steps."""
        return max(1, -(-steps // self._max_round_steps))

    def _get_round_slice(self, round_: int) -> slice:
        """Returns the slice of a round among the steps of its group of epochs."""
        begin = round_ % self._rounds_per_group * self._max_round_steps
        return slice(begin, begin + self._max_round_steps)

    def _get_group_sizes(self, group: int) -> list[tuple[int, bool]]:
        """Returns the size of each batch in a group of epochs, each with whether it is the last of
        its epoch.
        """
        epochs = [
            self._sizes[: self._count_batches(epoch)] for epoch in self._get_group_epochs(group)
        ]
        return [
            (size, position + 1 == len(sizes))
            for sizes in epochs
            for position, size in enumerate(sizes)
        ]

    def _get_group_epochs(self, group: int) -> range:
        begin = group * self._settings.validate_every
        return range(begin, min(begin + self._settings.validate_every, self.epochs))

    def _count_batches(self, epoch: int) -> int:
        """Returns the number of batches of an epoch that begin before ``max_bytes`` have been
        exchanged.
        """
        max_bytes = self._settings.max_bytes
        if max_bytes is None:
            return len(self._sizes)
        bytes_before = accumulate(self._bytes, initial=epoch * sum(self._bytes))
        return sum(
            bytes_sent < max_bytes for bytes_sent, _ in zip(bytes_before, self._bytes, strict=False)
        )

    def _make_epoch(self, epoch: int) -> list[Rows]:
        rows = self._party.rows.get_joint("train")
        return batches(self._party.recipe.seed, self._phase, epoch, rows, self._settings.batch_size)
