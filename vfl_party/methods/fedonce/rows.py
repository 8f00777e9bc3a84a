"""Selects the rows from which a party learns and their batches, and checks the loss of an epoch."""

from __future__ import annotations

import math

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batches, derive_seed
from vfl_party.phases.context import Party


def get_training_rows(party: Party, phase: str, split: str) -> Rows:
    """Returns the rows of a split. Raises InputError if the split has fewer than two rows."""
    rows = party.rows(split)
    if len(rows) < 2:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: {party.name} needs at least 2 rows to learn from (got "
            f"{len(rows)}). Add rows, or make the other splits smaller.",
        )
    return rows


def divergence_error(party: Party, phase: str) -> InputError:
    """Returns the error for a training that has diverged. No peer can notice this, because nothing
    is sent.
    """
    return InputError(
        Code.NON_FINITE,
        f"phase {phase}: the encoder of {party.name} gives NaN or infinity, because its training "
        "diverged. Lower the learning rate.",
    )


def check_finite(loss: float, party: Party, phase: str) -> float:
    """Returns ``loss`` unchanged. Raises InputError if it is NaN or infinite, which no other party
    could notice.
    """
    if not math.isfinite(loss):
        raise divergence_error(party, phase)
    return loss


def make_own_batches(party: Party, phase: str, epoch: int, n: int, size: int) -> list[Rows]:
    """Returns the batches of an epoch over positions 0 to n - 1, in an order that only this party
    knows.
    """
    seed = derive_seed(party.own_seed, party.name)
    return batches(seed, phase, epoch, np.arange(n, dtype=np.int64), size)
