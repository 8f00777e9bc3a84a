"""Chooses the training rows from which a round's trees learn: a random share of all rows, or mostly
the rows with large gradients (GOSS).

GOSS (LightGBM, Ke et al. 2017) keeps the rows with the largest gradients, draws some of the
remaining rows, and weights these so that they represent all remaining rows. Only the active party
knows gradients, so it sends the rows to the passive parties.
"""

from __future__ import annotations

import hashlib

import numpy as np

from vfl_party.base.seeds import Rows, derive_seed, draw_permutation
from vfl_party.methods.secureboost.settings import GossSettings, SecureBoostSettings
from vfl_party.methods.secureboost.tree.objective import Doubles


def count_drawn(count: int, settings: SecureBoostSettings) -> int:
    """Returns the number of training rows, out of ``count``, from which a round's trees learn; at
    least two.
    """
    if settings.goss is not None:
        return sum(count_parts(count, settings.goss))
    return count if settings.row_sample == 1.0 else max(2, round(settings.row_sample * count))


def count_parts(count: int, goss: GossSettings) -> tuple[int, int]:
    """Returns the number of rows that are kept because of large gradients, and the number of
    remaining rows that are drawn; at least two together.
    """
    top = min(round(goss.top * count), count - 1)
    return top, min(count - top, max(1, 2 - top, round(goss.rest * count)))


def sample_rows(
    seed: int, phase: str, round_: int, count: int, settings: SecureBoostSettings
) -> Rows:
    """Returns the positions of the training rows from which a round's trees learn, ascending; at
    least two.
    """
    if settings.row_sample == 1.0:
        return np.arange(count, dtype=np.int64)
    order = draw_permutation(derive_seed(seed, phase, "rows", round_), count)
    return np.sort(order[: count_drawn(count, settings)])


def derive_secret_seed(seed: int, phase: str, y_N: Doubles) -> int:
    """Returns a seed that only the active party knows. It is the same in each run with the same
    labels.

    It must be secret, because passive parties that can repeat the draw learn which sampled rows
    have large gradients.
    """
    return derive_seed(seed, phase, "goss", hashlib.sha256(y_N.tobytes()).hexdigest())


def by_gradient(goss: GossSettings, sizes_N: Doubles, seed: int) -> tuple[Rows, Doubles]:
    """Returns the rows of a round, ascending, and their weights [R].

    ``sizes_N``: the magnitude of each training row's gradients. Magnitudes are compared as float32,
    so that rounding does not matter, and ties are broken at random.
    """
    count = len(sizes_N)
    top, rest = count_parts(count, goss)
    order = draw_permutation(derive_seed(seed, "ties"), count)
    largest = order[np.argsort(-sizes_N.astype(np.float32)[order], kind="stable")]
    remaining = np.sort(largest[top:])
    picked = remaining[draw_permutation(derive_seed(seed, "rest"), len(remaining))[:rest]]
    weights_N = np.ones(count)
    weights_N[picked] = (count - top) / rest
    rows = np.sort(np.concatenate([largest[:top], picked]))
    return rows, weights_N[rows]
