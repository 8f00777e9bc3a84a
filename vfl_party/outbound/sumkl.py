"""Computes the noise of Marvell, which makes the gradients of two classes as similar as possible at
a given power.

Li et al., Label Leakage and Protection in Two-Party Split Learning (ICLR 2022), Theorem 2 and its
solver, but without a random start. Of the four variances, one follows from the power and one is
zero. One has a closed form, given the last one, which a grid search finds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The number of points and rounds of the grid search. Each round refines the grid around the best
# point.
_POINTS, _ROUNDS = 129, 6
# A variance below this value, relative to the squared distance of the means, counts as zero.
_NEGLIGIBLE = 1e-12

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Statistics of a batch's gradients of two classes.

    ``u``, ``v``: the mean variance of a coordinate, for negatives and for positives. ``gap``: the
    squared distance between the means. ``share``: the share of positives, between 0 and 1.
    ``width``: the number of coordinates of a gradient.
    """

    u: float
    v: float
    gap: float
    share: float
    width: int


@dataclass(frozen=True)
class Variances:
    """Variances of the noise along the difference of the means (1) and across it (2), for negatives
    (0) and positives (1).

    The variance across the difference is never the larger one: 0 <= ``across_0`` <= ``along_0``,
    and the same for positives.
    """

    along_0: float
    across_0: float
    along_1: float
    across_1: float


def sum_kl(statistics: Statistics, noise: Variances) -> float:
    """Returns KL(positive ‖ negative) + KL(negative ‖ positive) of the gradients with noise,
    assumed Gaussian.

    ½·[(d−1)·(a/b + b/a) + (A + g)/B + (B + g)/A] − d, with a = λ20 + u, b = λ21 + v, A = λ10 + u, B
    = λ11 + v.
    """
    a, b = noise.across_0 + statistics.u, noise.across_1 + statistics.v
    along = _sum_along_terms(
        noise.along_0 + statistics.u, noise.along_1 + statistics.v, statistics.gap
    )
    across_dims = statistics.width - 1
    across = across_dims * (_ratio(a, b) + _ratio(b, a)) if across_dims else 0.0
    return 0.5 * (across + along) - statistics.width


def optimum(statistics: Statistics, power: float) -> Variances:
    """Returns the noise of mean squared length ``power`` that has the minimum sumKL: p·λ11 +
    p(d−1)·λ21 + (1−p)·λ10 + (1−p)(d−1)·λ20 = power.

    The class with the larger variance gets no noise across (u < v: λ21 = 0; u > v: λ20 = 0).
    Without variance the closed form is E = √((P + (1−p)g)/(P + pg)), λ10 = (P/p)/(E + (1−p)/p), λ11
    = (P − (1−p)λ10)/p. ``gap`` must be positive.
    """
    gap, p = statistics.gap, statistics.share
    u, v, budget = statistics.u / gap, statistics.v / gap, power / gap
    if max(u, v) < _NEGLIGIBLE:
        e = math.sqrt((budget + (1 - p)) / (budget + p))
        along_0 = (budget / p) / (e + (1 - p) / p)
        return Variances(gap * along_0, 0.0, gap * (budget - (1 - p) * along_0) / p, 0.0)
    # Solve the mirrored problem, in which the two classes are swapped.
    if u > v:
        mirrored = _solve(v, u, budget, 1 - p, statistics.width)
        return Variances(gap * mirrored[2], 0.0, gap * mirrored[0], gap * mirrored[1])
    along_0, across_0, along_1 = _solve(u, v, budget, p, statistics.width)
    return Variances(gap * along_0, gap * across_0, gap * along_1, 0.0)


def _solve(u: float, v: float, budget: float, p: float, d: int) -> tuple[float, float, float]:
    """Returns the optimal λ10, λ20, λ11 for u <= v and means at distance 1. λ21 is 0."""
    low, high = 0.0, min(v - u, budget / ((1 - p) * d)) if d > 1 else 0.0
    best = 0.0
    for _ in range(_ROUNDS if high > 0 else 0):
        y = np.linspace(low, high, _POINTS)
        with np.errstate(divide="ignore"):
            values = (d - 1) * ((y + u) / v + v / (y + u)) + _solve_along(y, u, v, budget, p, d)[1]
        place = int(values.argmin())
        best = float(y[place])
        low, high = float(y[max(0, place - 1)]), float(y[min(_POINTS - 1, place + 1)])
    along_0 = float(_solve_along(np.array([best]), u, v, budget, p, d)[0][0])
    along_1 = max(0.0, (budget - (1 - p) * (d - 1) * best - (1 - p) * along_0) / p)
    return along_0, best, along_1


def _solve_along(
    y: Numbers, u: float, v: float, budget: float, p: float, d: int
) -> tuple[Numbers, Numbers]:
    """Returns the best λ10 for each λ20 = y, and the resulting sumKL terms along the difference.

    With A = λ10 + u and B = λ11 + v, the budget gives B = α − βA. Then (A + 1)/B + (B + 1)/A is
    convex in A, and its derivative is zero at a root of a quadratic.
    """
    q = 1 - p
    beta = q / p
    alpha = (budget - q * (d - 1) * y + p * v + q * u) / p
    n2, n1, n0 = 1 + beta**2, 1 - beta - 2 * alpha * beta, alpha**2 + alpha
    b = 2 * n0 * beta
    root = np.sqrt(np.maximum(0.0, b**2 + 4 * (n2 * alpha + n1 * beta) * n0 * alpha))
    a = np.clip(2 * n0 * alpha / (b + root), y + u, np.maximum(y + u, (alpha - v) / beta))
    with np.errstate(divide="ignore"):
        b_11 = np.maximum(alpha - beta * a, 0.0)
        return a - u, (a + 1) / b_11 + (b_11 + 1) / a


def _sum_along_terms(a: float, b: float, gap: float) -> float:
    return _ratio(a + gap, b) + _ratio(b + gap, a)


def _ratio(above: float, below: float) -> float:
    """Returns above / below; 0 / 0 is 1, because both classes are then equal."""
    if below == 0.0:
        return 1.0 if above == 0.0 else math.inf
    return above / below
