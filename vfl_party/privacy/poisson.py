"""Poisson sampling: every row is in a batch with the same probability, whatever other rows are (Abadi et al. 2016).

The accountant's ε counts on it that nobody else knows who was in a batch. Therefore the key comes from the operating
system and stays with its party; a seed of the recipe's would be known to all. A party's key is its own for a second
reason: the RDP of two parties adds up only where they sample independently.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vfl_party.seeds import derive_seed

Rows = npt.NDArray[np.int64]


def sampling_rate(rows: int, batch_size: int) -> float:
    """The probability q with which a row is in a batch of ``batch_size`` on average."""
    return min(1.0, batch_size / rows)


def steps_an_epoch(rows: int, batch_size: int) -> int:
    """As many as there are batches without sampling; a row is then in about one of them."""
    return -(-rows // batch_size)


def batches(key: int, epoch: int, rows: Rows, batch_size: int) -> list[Rows]:
    """The batches of one epoch, some of them possibly empty: a function of all arguments, on every machine alike."""
    n = len(rows)
    bits = np.random.Philox(key=derive_seed(key, "poisson", epoch))
    if batch_size >= n:
        return [rows.copy() for _ in range(steps_an_epoch(n, batch_size))]
    threshold = np.uint64(sampling_rate(n, batch_size) * 2.0**64)
    return [rows[bits.random_raw(n) < threshold] for _ in range(steps_an_epoch(n, batch_size))]
