"""The rows that a party learns from, their batches, and the check of an epoch's loss."""

from __future__ import annotations

import math

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batches, derive_seed
from vfl_party.phases.context import Party


def rows_to_learn(party: Party, phase: str, split: str) -> Rows:
    """Returns the rows of a split. Raises InputError if there are fewer than two."""
    rows = party.rows(split)
    if len(rows) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: {party.name} needs at least 2 rows to learn from (got "
            f"{len(rows)}). Add rows, or make the other splits smaller.",
        )
    return rows


def divergence_error(party: Party, phase: str) -> InputError:
    """Returns the error for a diverged training, which no peer can notice because nothing is
    sent.
    """
    return InputError(
        Code.NON_FINITE,
        f"phase {phase}: the encoder of {party.name} gives NaN or infinity, because its training "
        "diverged. Lower the learning rate.",
    )


def check_finite(loss: float, party: Party, phase: str) -> float:
    """Returns the value unchanged. Raises InputError if it is NaN or infinite (no other party could
    notice).
    """
    if not math.isfinite(loss):
        raise divergence_error(party, phase)
    return loss


def own_batches(party: Party, phase: str, epoch: int, n: int, size: int) -> list[Rows]:
    """Returns the batches of an epoch over positions 0 to n - 1, in this party's own order."""
    seed = derive_seed(party.own_seed, party.name)
    return batches(seed, phase, epoch, np.arange(n, dtype=np.int64), size)
