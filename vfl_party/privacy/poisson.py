"""Poisson sampling: every row is in a batch with the same probability, independently of others
(Abadi et al. 2016).

The accountant's ε assumes that nobody else knows which rows were in a batch. Therefore the key
comes from the operating system and stays with its party; the recipe's seed is known to all. Each
party has its own key for a second reason: the RDP of two parties adds up only if they sample
independently.
"""

from __future__ import annotations

import numpy as np

from vfl_party.base.seeds import Rows, derive_seed


def sampling_rate(rows: int, batch_size: int) -> float:
    """Returns the probability q that a row is in a batch, so that batches have ``batch_size`` rows
    on average.
    """
    return min(1.0, batch_size / rows)


def steps_an_epoch(rows: int, batch_size: int) -> int:
    """Returns the number of batches without sampling, so that a row is in about one batch of an
    epoch.
    """
    return -(-rows // batch_size)


def batches(key: int, epoch: int, rows: Rows, batch_size: int) -> list[Rows]:
    """Returns the batches of one epoch, possibly empty ones: determined by the arguments, equal on
    every machine.
    """
    n = len(rows)
    bits = np.random.Philox(key=derive_seed(key, "poisson", epoch))
    if batch_size >= n:
        return [rows.copy() for _ in range(steps_an_epoch(n, batch_size))]
    threshold = np.uint64(sampling_rate(n, batch_size) * 2.0**64)
    return [rows[bits.random_raw(n) < threshold] for _ in range(steps_an_epoch(n, batch_size))]
