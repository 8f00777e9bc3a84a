"""Functions that both sides of the phase share: the rows of the trees, checks, exchanges, splits
and log messages.

The recipe determines the sizes of keys, gradients and verdicts, and of the exchanges after the last
tree. The number of a tree's nodes and the owners of its splits depend on the data. So the sizes of
sums and of the rows' sides are the maximum for the depth and the number of leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.homomorphic import check, cipher_bytes, ciphers_for, count_sums_per_cipher, key_room
from vfl_party.methods.secureboost.columns import (
    ELSEWHERE,
    Codes,
    Column,
    Layout,
    learn_columns,
    sample_columns,
)
from vfl_party.methods.secureboost.forest import Bools, TreeSplit, bytes_for_bits
from vfl_party.methods.secureboost.growing import count_drawn
from vfl_party.methods.secureboost.guard import check_limits
from vfl_party.methods.secureboost.joint_walk import rows_at_once
from vfl_party.methods.secureboost.settings import (
    KEY,
    MAX_ENTRIES,
    PARTITION,
    SAMPLE,
    VERDICT,
    SecureBoostSettings,
    gradients,
    sums,
    walk,
)
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party

log = logging.getLogger(__name__)
T = TypeVar("T")


def get_routed_rows(party: Party, settings: SecureBoostSettings) -> Rows:
    """Returns the rows that pass through the growing trees: the training rows, then the validation
    rows if early stopping needs them.
    """
    rows_by_split = [party.rows.get("train")]
    if settings.early_stopping is not None:
        rows_by_split.append(party.rows.get("validation"))
    return np.concatenate(rows_by_split)


def check_phase(party: Party, phase: str, settings: SecureBoostSettings) -> None:
    """Checks the recipe and the data before joining, and warns of unencrypted gradients. Raises
    InputError if a check fails.
    """
    where = f"recipe: phases: {phase}"
    check(settings.encryption, where)
    if len(party.rows.get("train")) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: at least 2 labelled training rows are needed (got "
            f"{len(party.rows.get('train'))}). Add rows with labels to the training split.",
        )
    if settings.early_stopping is not None and len(party.rows.get("validation")) == 0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: early_stopping needs validation rows (got none). Set rows.validation or "
            "data.split.",
        )
    check_limits(party, phase, settings)
    if settings.encryption == "none" and party.recipe.passives:
        log.warning(
            '%s: encryption = "none": the passive parties can read every gradient, and therefore '
            "the labels",
            where,
            extra={"event": "advice"},
        )


@dataclass(frozen=True)
class OpenExchanges(Generic[T]):
    """One side's exchanges of the phase. ``sample`` and ``verdict`` are None unless the settings
    need them.
    """

    key: T
    gradients: T
    sums: T
    partition: T
    sample: T | None
    verdict: T | None


def open_exchanges(
    open_: Callable[..., T], phase: str, settings: SecureBoostSettings
) -> OpenExchanges[T]:
    """Opens the exchanges with ``open_asking`` or ``open_answering``, in the same order on both
    sides.
    """
    width, room = (
        size(settings.encryption, settings.key_bits) for size in (cipher_bytes, key_room)
    )
    return OpenExchanges(
        open_(phase, KEY, room=room),
        open_(phase, gradients(settings), bytes=width),
        open_(phase, sums(settings), bytes=width),
        open_(phase, PARTITION),
        open_(phase, SAMPLE) if settings.goss is not None else None,
        open_(phase, VERDICT) if settings.early_stopping is not None else None,
    )


def check_num_splits(
    party: Party, phase: str, settings: SecureBoostSettings, columns: list[Column]
) -> None:
    """Raises InputError if the columns have more possible splits for a tree than allowed."""
    counts = sorted((len(Layout.of([column], [0]).entries) for column in columns), reverse=True)
    offered = sum(counts[: max(1, round(settings.column_sample * len(columns)))])
    if offered > MAX_ENTRIES:
        raise InputError(
            Code.DATA_INVALID,
            f"recipe: phases: {phase}: the columns of {party.name} must offer a tree at most "
            f"{MAX_ENTRIES:,} splits (got {offered:,}). Lower bins or column_sample, or drop "
            "columns.",
        )


def log_constant_columns(party: Party, phase: str, columns: list[Column]) -> None:
    """Writes the names of constant columns, which trees cannot use, to this party's log."""
    names = [repr(column.name) for column in columns if column.size < 2]
    if names:
        log.warning(
            "phase %s: columns of %s that are constant in the training rows and cannot be used by "
            "trees: %s",
            phase,
            party.name,
            ", ".join(names),
            extra={"event": "advice"},
        )


def log_importance(party: Party, phase: str, importance: Mapping[str, float], unit: str) -> None:
    """Writes the importance of each of this party's columns to its log."""
    text = ", ".join(f"{name} {value:.6g}" for name, value in importance.items()) or "none"
    log.info(
        "phase %s: %s of the columns of %s: %s",
        phase,
        unit,
        party.name,
        text,
        extra={"event": "importance"},
    )


def make_split(columns: list[Column], layout: Layout, flags: Bools, codes_NF: Codes) -> TreeSplit:
    """Makes a split from the ``flags`` of the chosen entries. ``codes_NF``: the codes of the node's
    rows in the sample.

    Cells with other codes follow the majority of rows, and go left in a tie. Raises ValueError if
    no flag is set.
    """
    column, left = layout.choose_left(columns, flags)
    codes_N = codes_NF[:, column]
    known_N = codes_N[codes_N != ELSEWHERE]
    counts = np.bincount(known_N, minlength=len(left))
    to_left = int(counts[np.array(left)].sum())
    majority_left = 2 * to_left >= len(known_N)
    if columns[column].cuts is None:
        left = [
            majority_left if not count else goes
            for goes, count in zip(left, counts.tolist(), strict=True)
        ]
    return TreeSplit(column, tuple(left), majority_left)


UPPER_BOUND = (
    "a tree may have fewer nodes than its depth allows, so sums and the rows' sides are upper "
    "bounds; the rest is exact"
)


def traffic(party: Party, name: str, settings: SecureBoostSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``. A party's sums are left out, and
    ``bound`` says so, if its columns are unknown here.
    """
    columns_by_party = {
        holder.name: learn_columns(holder, settings.bins, holder.rows.get("train"))
        for holder in (party, *party.exchanges.others.values())
        if holder.role == "passive" and holder.rows.data.columns is not None
    }
    unknown = [
        passive.name for passive in party.recipe.passives if passive.name not in columns_by_party
    ]
    growth = Growth(party, name, settings, columns_by_party)
    bound = UPPER_BOUND
    if unknown:
        max_bytes = -(
            -sum(growth.count_summed_nodes(level) for level in range(settings.depth))
            * growth.width
            // growth.together
        )
        bound = (
            f"{UPPER_BOUND}; the sums of {', '.join(unknown)} are not counted, because they depend "
            "on columns that this party does not have (a recipe with [simulate] has them): about "
            f"{max_bytes:,} bytes per tree for each possible split"
        )
    stops_early = settings.early_stopping is not None
    return Traffic(
        growth.yield_rounds(), stops_early, step="gradients", after=growth.walk, bound=bound
    )


@dataclass
class Growth:
    """Yields the exchanges of a phase. ``known``: {passive party: its columns}, for the parties
    whose columns are known here.
    """

    party: Party
    name: str
    settings: SecureBoostSettings
    known: Mapping[str, list[Column]]

    def __post_init__(self) -> None:
        self.width = cipher_bytes(self.settings.encryption, self.settings.key_bits)
        self.together = count_sums_per_cipher(self.settings.encryption, self.settings.key_bits)
        self._gradients, self._sums, self._walk = (
            gradients(self.settings),
            sums(self.settings),
            walk(),
        )
        self._next_step_key = StepKey(self.name, 0, 0)

    def count_summed_nodes(self, level: int) -> int:
        """Returns the maximum number of nodes of a level whose sums are sent: one of two
        siblings.
        """
        return max(1, min(1 << level, 2 * (self._max_leaves - 1)) // 2)

    @property
    def _max_leaves(self) -> int:
        return self.settings.leaves or 1 << self.settings.depth

    @cached_property
    def _num_routed(self) -> int:
        return len(get_routed_rows(self.party, self.settings))

    def yield_rounds(self) -> Iterator[Occurrence]:
        """Yields the exchanges of all rounds, except the evaluation after the last tree."""
        settings = self.settings
        for round_ in range(settings.trees):
            self._next_step_key = StepKey(self.name, round_, 0)
            if round_ == 0:
                yield self._make_next(KEY, room=key_room(settings.encryption, settings.key_bits))
            if round_ or not settings.first_tree_own:
                yield from self._yield_trees(round_)
            if settings.early_stopping is not None:
                yield self._make_next(VERDICT)

    def _yield_trees(self, round_: int) -> Iterator[Occurrence]:
        """Yields the exchanges of the trees of one round."""
        settings, count = self.settings, self._num_routed
        train = len(self.party.rows.get("train"))
        rows = count_drawn(train, settings)
        if settings.goss is not None:
            yield self._make_next(SAMPLE, packed=bytes_for_bits(train))
        offered = {
            passive.name: self._get_entry_sizes(passive.name, round_)
            for passive in self.party.recipe.passives
        }
        for _ in range(self.party.recipe.task.outputs):
            parts = {name: {"parts": len(sizes)} for name, sizes in offered.items()}
            yield from self._yield_for_each(self._gradients, parts, rows=rows, bytes=self.width)
            for level in range(settings.depth):
                entries = {
                    name: {
                        "sums": ciphers_for(
                            self.count_summed_nodes(level) * sum(sizes), self.together
                        ),
                        "entries": sum(sizes),
                    }
                    for name, sizes in offered.items()
                }
                nodes = min(1 << level, 2 * (self._max_leaves - 1))
                yield from self._yield_for_each(self._sums, entries, nodes=nodes, bytes=self.width)
                last = level + 1 == settings.depth
                yield self._make_next(
                    PARTITION, packed=bytes_for_bits(count), rows=0 if last else count
                )

    def _get_entry_sizes(self, party: str, round_: int) -> tuple[int, ...]:
        """Returns the numbers of a party's entries in a round; (0,) if its columns are unknown
        here.
        """
        if party not in self.known:
            return (0,)
        columns, share = self.known[party], self.settings.column_sample
        chosen = sample_columns(
            self.party.recipe.seed, self.name, party, round_, len(columns), share
        )
        return Layout.of(columns, chosen).sizes

    def walk(self, rounds: int | None) -> Iterator[Occurrence]:
        """Yields the exchanges after the last tree. ``rounds``: the number of rounds after which
        early stopping has ended the phase, if known.
        """
        settings = self.settings
        ended = settings.trees if rounds is None else min(rounds, settings.trees)
        stopped = ended < settings.trees and settings.early_stopping is not None
        remaining = max(0, ended - (settings.early_stopping or 0)) if stopped else ended
        trees = remaining * self.party.recipe.task.outputs
        self._next_step_key = StepKey(self.name, ended - 1, self._count_steps(ended - 1))
        chunk = rows_at_once(trees)
        for split in settings.splits:
            count = len(self.party.rows.get(split))
            for start in range(0, count, chunk):
                rows = min(chunk, count - start)
                for level in range(settings.depth + 1):
                    packed = bytes_for_bits(rows * trees) if level else 0
                    down = 0 if level == settings.depth else rows
                    yield self._make_next(self._walk, packed=packed, rows=down, trees=trees)

    def _count_steps(self, round_: int) -> int:
        """Returns the maximum number of steps in a round that come before the evaluation."""
        settings = self.settings
        without_passives = settings.first_tree_own and round_ == 0
        growth_steps = (
            0
            if without_passives
            else self.party.recipe.task.outputs * (1 + 2 * settings.depth)
            + (settings.goss is not None)
        )
        return (round_ == 0) + growth_steps + (settings.early_stopping is not None)

    def _make_next(self, exchange: Exchange, **sizes: int) -> Occurrence:
        """Returns the occurrence of ``exchange`` at the next step."""
        step = self._next_step_key
        self._next_step_key = StepKey(step.phase, step.round, step.batch + 1)
        return Occurrence.of(exchange, step, **sizes)

    def _yield_for_each(
        self, exchange: Exchange, sizes: Mapping[str, Mapping[str, int]], **common_sizes: int
    ) -> Iterator[Occurrence]:
        """Yields the occurrences of ``exchange`` at the next step, with the sizes of each passive
        party.
        """
        step = self._make_next(exchange).step
        for party, party_sizes in sizes.items():
            yield Occurrence(step, exchange, tuple({**common_sizes, **party_sizes}.items()), party)
