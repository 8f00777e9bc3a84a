"""Functions that both sides of the phase share: the rows of the trees, checks, exchanges, splits
and log messages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.homomorphic import check, cipher_bytes, key_room
from vfl_party.methods.secureboost.columns import ELSEWHERE, Codes, Column
from vfl_party.methods.secureboost.exchanges import (
    KEY,
    MAX_ENTRIES,
    PARTITION,
    SAMPLE,
    VERDICT,
    gradients,
    sums,
)
from vfl_party.methods.secureboost.guard import check_limits
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.entries import Layout
from vfl_party.methods.secureboost.tree.forest import TreeSplit
from vfl_party.methods.secureboost.tree.positions import Bools
from vfl_party.phases.context import Party

log = logging.getLogger(__name__)
T = TypeVar("T")


def get_routed_rows(party: Party, settings: SecureBoostSettings) -> Rows:
    """Returns the rows that pass through the growing trees: the training rows, then the validation
    rows if early stopping needs them.
    """
    rows_by_split = [party.rows("train")]
    if settings.early_stopping is not None:
        rows_by_split.append(party.rows("validation"))
    return np.concatenate(rows_by_split)


def check_phase(party: Party, phase: str, settings: SecureBoostSettings) -> None:
    """Checks the recipe and the data before joining, and warns of unencrypted gradients. Raises
    InputError if a check fails.
    """
    where = f"recipe: phases: {phase}"
    check(settings.encryption, where)
    if len(party.rows("train")) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: at least 2 labelled training rows are needed (got "
            f"{len(party.rows('train'))}). Add rows with labels to the training split.",
        )
    if settings.early_stopping is not None and len(party.rows("validation")) == 0:
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
    """Opens the exchanges with ``party.asking`` or ``party.answering``, in the same order on both
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
