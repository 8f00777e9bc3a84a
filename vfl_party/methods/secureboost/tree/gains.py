"""Finds the best split of a node from the sums of g and h for one party's entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic import Integers
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.objective import Doubles, Fixed

# The relative difference below which two gains, or two ratios of g to h, count as equal. The first
# of equal ones wins.
TIE = 1e-10
# A gain must exceed ``min_gain`` by more than this, because rounding gives useless splits a small
# gain.
MIN_GAIN = 1e-9

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sums:
    """The sums of g and h in fixed point, for a node or for each of its entries."""

    g: Integers
    h: Integers

    def __sub__(self, other: Sums) -> Sums:
        return Sums(self.g - other.g, self.h - other.h)


@dataclass(frozen=True)
class BestSplit:
    """The best split among one party's entries. ``flags``: the chosen entries; see
    ``Layout.choose_left``.
    """

    gain: float
    flags: Bools


class Gains:
    """Computes XGBoost's gain: half of G²/(H + lambda) of the left side, plus the same of the right
    side, minus the same of the node.
    """

    def __init__(self, settings: SecureBoostSettings, fixed: Fixed) -> None:
        self._lambda, self._weight, self._rate = (
            settings.lambda_,
            settings.min_child_weight,
            settings.learning_rate,
        )
        self._min_gain, self._fixed = settings.min_gain + MIN_GAIN, fixed

    def compute_leaf(self, node: Sums) -> float:
        """Returns the value of a leaf, multiplied by the learning rate."""
        g, h = (float(self._fixed.to_doubles(sums_)[0]) for sums_ in (node.g, node.h))
        return -self._rate * g / (h + self._lambda) if h + self._lambda > 0.0 else 0.0

    def sum_h(self, node: Sums) -> float:
        """Returns the sum of h of a node."""
        return float(self._fixed.to_doubles(node.h)[0])

    def find_best(self, node: Sums, entries: Sums, sizes: Sequence[int]) -> BestSplit | None:
        """Returns the best split of a node, or None if no split gains enough. ``sizes``: see
        ``Layout.sizes``.
        """
        numbers = self._compute_gains(node, Sums(entries.g[: sizes[0]], entries.h[: sizes[0]]))
        best_number_gain = float(numbers.max(initial=-np.inf))
        sets, start_ = list[tuple[int, float, Bools]](), sizes[0]
        for size in sizes[1:]:
            gain, chosen = self._find_best_set(
                node, Sums(entries.g[start_ : start_ + size], entries.h[start_ : start_ + size])
            )
            sets.append((start_, gain, chosen))
            start_ += size
        best_gain = max([best_number_gain, *(gain for _, gain, _ in sets)])
        if not best_gain > self._min_gain:
            return None
        threshold = best_gain - TIE * abs(best_gain)
        flags = np.zeros(len(entries.g), bool)
        flags[: sizes[0]] = numbers >= threshold
        for start, gain, chosen in sets:
            if gain >= threshold:
                flags[start : start + len(chosen)] = chosen
        return BestSplit(best_gain, flags)

    def _compute_gains(self, node: Sums, left: Sums) -> Doubles:
        """Returns the gain of each left side; minus infinity if the sum of h on a side is too
        small.
        """
        to_doubles, right = self._fixed.to_doubles, Sums(node.g - left.g, node.h - left.h)
        light = np.minimum(to_doubles(left.h), to_doubles(right.h)) < self._weight
        empty = (left.h <= 0) | (right.h <= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            score = [
                to_doubles(sums_.g) ** 2 / (to_doubles(sums_.h) + self._lambda)
                for sums_ in (left, right, node)
            ]
        return np.where(light | empty, -np.inf, 0.5 * (score[0] + score[1] - score[2]))

    def _find_best_set(self, node: Sums, sums_: Sums) -> tuple[float, Bools]:
        """Returns the best gain of a set of categories, and the set's categories, which have the
        smallest G/H.

        Categories without rows in the node are left out. Categories with equal ratios stay
        together.
        """
        chosen, present = np.zeros(len(sums_.g), bool), np.flatnonzero(sums_.h > 0)
        ratios = sums_.g[present] / sums_.h[present]
        order = np.argsort(ratios, kind="stable")
        present, ratios = present[order], ratios[order]
        ends = np.flatnonzero(np.diff(ratios) > TIE * np.maximum(1.0, np.abs(ratios[:-1])))
        if not len(ends):
            return -np.inf, chosen
        gains = self._compute_gains(
            node, Sums(np.cumsum(sums_.g[present])[ends], np.cumsum(sums_.h[present])[ends])
        )
        best_gain = float(gains.max())
        if best_gain == -np.inf:
            return best_gain, chosen
        chosen[
            present[: ends[np.flatnonzero(gains >= best_gain - TIE * abs(best_gain))[0]] + 1]
        ] = True
        return best_gain, chosen
