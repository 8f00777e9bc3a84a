"""The noise of Marvell: at a given power, the noise that makes the gradients of two classes most
similar.

Li et al., Label Leakage and Protection in Two-Party Split Learning (ICLR 2022), Theorem 2 and its
solver, here without a random start: of the four numbers one is zero, one has a closed form given
the other, and that one is searched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Points and rounds of the search: each round looks closer around the best point.
_POINTS, _ROUNDS = 129, 6
# A variance this small, relative to the distance of the means, counts as zero.
_NOTHING = 1e-12

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Statistics of a batch's gradients of two classes.

    ``u``, ``v``: the mean variance of a coordinate, of negatives and positives. ``gap``: the
    squared distance of the means. ``share``: of positives, between 0 and 1. ``width``: of a
    gradient.
    """

    u: float
    v: float
    gap: float
    share: float
    width: int


@dataclass(frozen=True)
class Variances:
    """Noise along the difference of the means (1) and across it (2), for negatives (0) and
    positives (1).

    Along includes across: 0 <= ``across_0`` <= ``along_0``, and so for positives.
    """

    along_0: float
    across_0: float
    along_1: float
    across_1: float


def sum_kl(of: Statistics, noise: Variances) -> float:
    """Returns KL(positive ‖ negative) + KL(negative ‖ positive) of the noised gradients, taken as
    Gaussian.

    ½·[(d−1)·(a/b + b/a) + (A + g)/B + (B + g)/A] − d, with a = λ20 + u, b = λ21 + v, A = λ10 + u, B
    = λ11 + v.
    """
    a, b = noise.across_0 + of.u, noise.across_1 + of.v
    along = _along(noise.along_0 + of.u, noise.along_1 + of.v, of.gap)
    rest = of.width - 1
    across = rest * (_ratio(a, b) + _ratio(b, a)) if rest else 0.0
    return 0.5 * (across + along) - of.width


def optimum(of: Statistics, power: float) -> Variances:
    """Returns the noise of minimum sumKL with mean squared length ``power``:
    p·λ11 + p(d−1)·λ21 + (1−p)·λ10 + (1−p)(d−1)·λ20 = power.

    The class with the larger variance gets no noise across (u < v: λ21 = 0; u > v: λ20 = 0).
    Without variance it is the closed form E = √((P + (1−p)g)/(P + pg)), λ10 = (P/p)/(E + (1−p)/p),
    λ11 = (P − (1−p)λ10)/p. ``of.gap`` > 0.
    """
    gap, p = of.gap, of.share
    u, v, budget = of.u / gap, of.v / gap, power / gap
    if max(u, v) < _NOTHING:
        e = math.sqrt((budget + (1 - p)) / (budget + p))
        along_0 = (budget / p) / (e + (1 - p) / p)
        return Variances(gap * along_0, 0.0, gap * (budget - (1 - p) * along_0) / p, 0.0)
    # The mirrored problem: classes change places.
    if u > v:
        mirrored = _optimum(v, u, budget, 1 - p, of.width)
        return Variances(gap * mirrored[2], 0.0, gap * mirrored[0], gap * mirrored[1])
    along_0, across_0, along_1 = _optimum(u, v, budget, p, of.width)
    return Variances(gap * along_0, gap * across_0, gap * along_1, 0.0)


def _optimum(u: float, v: float, budget: float, p: float, d: int) -> tuple[float, float, float]:
    """Returns λ10, λ20, λ11 for u <= v and means at distance 1; λ21 = 0."""
    low, high = 0.0, min(v - u, budget / ((1 - p) * d)) if d > 1 else 0.0
    best = 0.0
    for _ in range(_ROUNDS if high > 0 else 0):
        y = np.linspace(low, high, _POINTS)
        with np.errstate(divide="ignore"):
            values = (d - 1) * ((y + u) / v + v / (y + u)) + _inner(y, u, v, budget, p, d)[1]
        place = int(values.argmin())
        best = float(y[place])
        low, high = float(y[max(0, place - 1)]), float(y[min(_POINTS - 1, place + 1)])
    along_0 = float(_inner(np.array([best]), u, v, budget, p, d)[0][0])
    along_1 = max(0.0, (budget - (1 - p) * (d - 1) * best - (1 - p) * along_0) / p)
    return along_0, best, along_1


def _inner(
    y: Numbers, u: float, v: float, budget: float, p: float, d: int
) -> tuple[Numbers, Numbers]:
    """Returns the best λ10 for each λ20 = y, and the terms along the difference that it gives.

    With A = λ10 + u and B = λ11 + v the budget makes B = α − βA, and (A + 1)/B + (B + 1)/A is
    convex in A; its derivative is zero at a root of a quadratic.
    """
    q = 1 - p
    beta = q / p
    alpha = (budget - q * (d - 1) * y + p * v + q * u) / p
    n2, n1, n0 = 1 + beta**2, 1 - beta - 2 * alpha * beta, alpha**2 + alpha
    b = 2 * n0 * beta
    root = np.sqrt(np.maximum(0.0, b**2 + 4 * (n2 * alpha + n1 * beta) * n0 * alpha))
    a = np.clip(2 * n0 * alpha / (b + root), y + u, np.maximum(y + u, (alpha - v) / beta))
    with np.errstate(divide="ignore"):
        other = np.maximum(alpha - beta * a, 0.0)
        return a - u, (a + 1) / other + (other + 1) / a


def _along(a: float, b: float, gap: float) -> float:
    return _ratio(a + gap, b) + _ratio(b + gap, a)


def _ratio(above: float, below: float) -> float:
    """Returns above / below; of nothing to nothing it is 1, as both classes are equal."""
    if below == 0.0:
        return 1.0 if above == 0.0 else math.inf
    return above / below
