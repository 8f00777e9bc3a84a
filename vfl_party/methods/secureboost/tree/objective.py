"""The loss of the trees: initial scores, derivatives, and the representation of derivatives as
integers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_common.config.models import TaskSettings
from vfl_party.homomorphic import Integers

Doubles = npt.NDArray[np.float64]
# The maximum number of bits after the binary point.
MAX_FRACTION = 50
# The number of bits for a sum of g or h, below the limit of packing.
SUM_BITS = 61


def compute_base(task: TaskSettings, y_N: Doubles) -> Doubles:
    """Returns the scores [K] before the first tree: the log-odds, the logarithms of the class
    shares, or the mean target.
    """
    if task.kind == "binary":
        share = float(y_N.mean())
        return np.array([math.log(share / (1.0 - share))])
    if task.kind == "regression":
        return np.array([float(y_N.mean())])
    counts = np.bincount(y_N.astype(np.int64), minlength=task.outputs)
    return np.log(np.maximum(counts, 1e-3) / len(y_N))


def derivatives(
    task: TaskSettings, scores_NK: Doubles, y_N: Doubles, k: int
) -> tuple[Doubles, Doubles]:
    """Returns g and h [N] of the loss of each row with respect to its score of class ``k``."""
    if task.kind == "regression":
        return scores_NK[:, 0] - y_N, np.ones(len(y_N))
    if task.kind == "binary":
        p_N = 1.0 / (1.0 + np.exp(-scores_NK[:, 0]))
        return p_N - y_N, p_N * (1.0 - p_N)
    powers_NK = np.exp(scores_NK - scores_NK.max(axis=1, keepdims=True))
    p_N = powers_NK[:, k] / powers_NK.sum(axis=1)
    # h is twice the second derivative, as in XGBoost.
    return p_N - (y_N == k), 2.0 * p_N * (1.0 - p_N)


@dataclass(frozen=True)
class Fixed:
    """Converts numbers to fixed point: integers that are 2^``fraction`` times as large, so that
    sums are exact in any order.
    """

    fraction: int

    @classmethod
    def of(cls, g_N: Doubles, h_N: Doubles) -> Fixed:
        """Chooses the largest ``fraction`` for which the sums over all rows fit."""
        largest = max(float(np.abs(g_N).max(initial=0.0)), float(h_N.max(initial=0.0)), 2.0**-20)
        return cls(min(MAX_FRACTION, SUM_BITS - math.frexp(largest * max(1, len(g_N)))[1]))

    def to_integers(self, values_N: Doubles) -> Integers:
        """Returns the values as integers in fixed point, rounded."""
        return np.rint(np.ldexp(values_N, self.fraction)).astype(np.int64)

    def to_doubles(self, values_N: Integers) -> Doubles:
        """Returns the numbers that integers in fixed point represent."""
        return np.ldexp(values_N.astype(np.float64), -self.fraction)
