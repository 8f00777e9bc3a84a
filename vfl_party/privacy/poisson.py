"""Poisson sampling: every row is in a batch with the same probability, independently of other rows
(Abadi et al. 2016).

The accountant's ε assumes that nobody else knows which rows were in a batch. All parties know the
recipe's seed, so each party samples with a secret key from its operating system. The keys of two
parties must also be independent, or their RDP does not add up.
"""

from __future__ import annotations

import numpy as np

from vfl_party.base.seeds import Rows, derive_seed


def compute_sampling_rate(rows: int, batch_size: int) -> float:
    """Returns the probability q that a row is in a batch, so that batches have ``batch_size`` rows
    on average.
    """
    return min(1.0, batch_size / rows)


def count_steps_per_epoch(rows: int, batch_size: int) -> int:
    """Returns the number of steps of an epoch, in which a row is in one batch on average."""
    return -(-rows // batch_size)


def draw_batches(key: int, epoch: int, rows: Rows, batch_size: int) -> list[Rows]:
    """Returns the row numbers of each batch of one epoch. A batch may be empty. The same arguments
    give the same batches on every machine.
    """
    n = len(rows)
    bits = np.random.Philox(key=derive_seed(key, "poisson", epoch))
    if batch_size >= n:
        return [rows.copy() for _ in range(count_steps_per_epoch(n, batch_size))]
    threshold = np.uint64(compute_sampling_rate(n, batch_size) * 2.0**64)
    return [
        rows[bits.random_raw(n) < threshold] for _ in range(count_steps_per_epoch(n, batch_size))
    ]
