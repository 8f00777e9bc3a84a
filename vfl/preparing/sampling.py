"""Draws rows with stratification: a subset of a data set, and validation rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl.preparing.content import TRAIN, VALIDATION, Array, Content, Rows
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed, draw_permutation

# The golden ratio's fraction. The fractions of its multiples are evenly spread (Weyl's sequence).
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def draw_rows(content: Content, rows: int | None, seed: int) -> Rows:
    """Draws a number of rows with the same shares of classes and splits as in the data set. Returns
    their row numbers, increasing. With ``rows=None``, returns all row numbers.

    Raises InputError if the data set has fewer rows.
    """
    n = len(content)
    if rows is None:
        return np.arange(n)
    if not 1 <= rows <= n:
        raise InputError(
            Code.CONFIG_INVALID, f"rows: must be from 1 to {n:,} (got {rows:,}). Give fewer rows."
        )
    return _draw(_compute_strata(content), rows, derive_seed(seed, "prepare", "rows"))


def add_validation(content: Content, used: Rows, share: float, seed: int) -> Array | None:
    """Returns the splits, with a share of the training rows changed to validation rows, stratified
    by class. Returns None if the data set has no splits.
    """
    if content.splits is None:
        return None
    splits = np.array(content.splits, object)
    train = used[splits[used] == TRAIN]
    count = round(share * len(train))
    if count:
        strata = _compute_strata(content)[train]
        splits[train[_draw(strata, count, derive_seed(seed, "prepare", "validation"))]] = VALIDATION
    return splits.astype("S10")


def _compute_strata(content: Content) -> npt.NDArray[np.int64]:
    """Returns the number of each row's stratum, a combination of its class and its split."""
    n = len(content)
    keys: list[npt.NDArray[Any]] = [np.zeros(n, np.int64)]
    if content.labels.dtype.kind in "iu":
        keys.append(np.unique(content.labels, return_inverse=True)[1])
    if content.splits is not None:
        keys.append(np.unique(content.splits.astype(str), return_inverse=True)[1])
    strata = np.zeros(n, np.int64)
    for key in keys:
        strata = strata * (int(key.max(initial=0)) + 1) + key
    return strata


def _draw(strata_N: npt.NDArray[np.int64], count: int, seed: int) -> Rows:
    """Draws ``count`` row positions, as evenly from all strata as integers allow. Returns them in
    increasing order.

    The rows of each stratum are shuffled and placed at even distances between 0 and 1. The
    ``count`` rows with the lowest places are drawn. The first row of each stratum has a different
    place, so that from many small strata the right share of rows is drawn.
    """
    order = draw_permutation(seed, len(strata_N))
    shuffled = strata_N[order]
    by_stratum = np.argsort(shuffled, kind="stable")
    _, starts, sizes = np.unique(shuffled[by_stratum], return_index=True, return_counts=True)
    begins = (np.arange(len(starts)) * _GOLDEN + derive_seed(seed, "begin") % 1000 / 1000) % 1.0
    place = np.empty(len(order))
    for start, size, begin in zip(starts, sizes, begins, strict=True):
        place[by_stratum[start : start + size]] = (np.arange(size) + begin) / size
    return np.sort(order[np.argsort(place, kind="stable")[:count]])
