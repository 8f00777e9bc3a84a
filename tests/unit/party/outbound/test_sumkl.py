"""Marvell's noise is the best of its power: against a grid over all four numbers, and the paper's
closed form.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from vfl_party.outbound.transforms import Statistics, Variances, optimum, sum_kl


def spent(of: Statistics, noise: Variances) -> float:
    p, d = of.share, of.width
    ones = p * (noise.along_1 + (d - 1) * noise.across_1)
    return ones + (1 - p) * (noise.along_0 + (d - 1) * noise.across_0)


def cases() -> list[tuple[Statistics, float]]:
    uv = [(0.0, 0.0), (0.3, 0.3), (0.01, 0.5), (0.5, 0.01), (2.0, 0.4), (0.0, 0.2), (0.2, 0.0)]
    return [
        (Statistics(u * gap, v * gap, gap, p, d), s * gap)
        for (u, v), p, d, s, gap in itertools.product(
            uv, (0.05, 0.5, 0.8), (1, 2, 16), (0.1, 4.0), (1.0, 3e-7)
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("of", "power"), cases())
def test_no_point_of_a_grid_is_better_and_all_power_is_spent(of: Statistics, power: float) -> None:
    best = optimum(of, power)
    assert 0 <= best.across_0 <= best.along_0 * (1 + 1e-9) + 1e-300
    assert 0 <= best.across_1 <= best.along_1 * (1 + 1e-9) + 1e-300
    assert spent(of, best) == pytest.approx(power, rel=1e-6)
    p, d, found = of.share, of.width, sum_kl(of, best)
    shares = np.linspace(0, 1, 13)
    # What part goes to positives, and across.
    for to_1, a, b in itertools.product(shares, shares, shares):
        of_1, of_0 = to_1 * power / p, (1 - to_1) * power / (1 - p)
        noise = Variances(
            of_0 * (1 - a * (d - 1) / d), of_0 * a / d, of_1 * (1 - b * (d - 1) / d), of_1 * b / d
        )
        assert spent(of, noise) == pytest.approx(power)
        assert found <= sum_kl(of, noise) * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("p", [0.1, 0.5, 0.7])
@pytest.mark.parametrize("s", [0.5, 4.0])
def test_without_variance_it_is_the_closed_form(p: float, s: float) -> None:
    gap, power = 2.0, s * 2.0
    best = optimum(Statistics(0.0, 0.0, gap, p, 8), power)
    e = math.sqrt((power + (1 - p) * gap) / (power + p * gap))
    along_0 = (power / p) / (e + (1 - p) / p)
    assert (best.along_0, best.across_0, best.across_1) == (pytest.approx(along_0), 0.0, 0.0)
    assert best.along_1 == pytest.approx((power - (1 - p) * along_0) / p)
    near = optimum(Statistics(1e-9, 1e-9, gap, p, 8), power)
    assert near.along_0 == pytest.approx(best.along_0, rel=1e-6)


def test_it_is_better_than_isotropic_noise_and_falls_with_power() -> None:
    of = Statistics(0.05, 0.4, 1.0, 0.2, 16)
    found = [sum_kl(of, optimum(of, power)) for power in (0.5, 2.0, 8.0, 32.0)]
    assert found == sorted(found, reverse=True)
    iso = [sum_kl(of, Variances(*(4 * [power / 16]))) for power in (0.5, 2.0, 8.0, 32.0)]
    assert all(one < other for one, other in zip(found, iso, strict=True))
