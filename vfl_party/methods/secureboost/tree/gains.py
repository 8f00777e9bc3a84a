"""The best split of a node, from the sums of g and h of the entries of all parties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vfl_party.homomorphic import Integers
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.objective import Doubles, Fixed

# Gains, and ratios of g to h, that differ by less (of themselves) count as equal: the first one
# wins.
TIE = 1e-10
# A gain must exceed ``min_gain`` by this much, because rounding gives useless splits a small gain.
MIN_GAIN = 1e-9

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sums:
    """g and h, in fixed point: of a node, or of its entries."""

    g: Integers
    h: Integers

    def __sub__(self, other: Sums) -> Sums:
        return Sums(self.g - other.g, self.h - other.h)


@dataclass(frozen=True)
class BestSplit:
    """The best split among one party's entries. ``flags``: see ``Layout.left``."""

    gain: float
    flags: Bools


class Gains:
    """XGBoost's gain: half of G²/(H + lambda) of the left, plus that of the right, less that of the
    node.
    """

    def __init__(self, settings: SecureBoostSettings, fixed: Fixed) -> None:
        self._lambda, self._weight, self._rate = (
            settings.lambda_,
            settings.min_child_weight,
            settings.learning_rate,
        )
        self._least, self._fixed = settings.min_gain + MIN_GAIN, fixed

    def leaf(self, node: Sums) -> float:
        """Returns the value of a leaf, with the learning rate."""
        g, h = (float(self._fixed.doubles(sums_)[0]) for sums_ in (node.g, node.h))
        return -self._rate * g / (h + self._lambda) if h + self._lambda > 0.0 else 0.0

    def weight(self, node: Sums) -> float:
        """Returns the sum of h."""
        return float(self._fixed.doubles(node.h)[0])

    def best(self, node: Sums, entries: Sums, sizes: Sequence[int]) -> BestSplit | None:
        """Returns the best split of a node, or None. ``sizes``: see ``Layout.sizes``."""
        numbers = self._gains(node, Sums(entries.g[: sizes[0]], entries.h[: sizes[0]]))
        top = float(numbers.max(initial=-np.inf))
        sets, at = list[tuple[int, float, Bools]](), sizes[0]
        for size in sizes[1:]:
            gain, chosen = self._best_set(
                node, Sums(entries.g[at : at + size], entries.h[at : at + size])
            )
            sets.append((at, gain, chosen))
            at += size
        best = max([top, *(gain for _, gain, _ in sets)])
        if not best > self._least:
            return None
        enough = best - TIE * abs(best)
        flags = np.zeros(len(entries.g), bool)
        flags[: sizes[0]] = numbers >= enough
        for start, gain, chosen in sets:
            if gain >= enough:
                flags[start : start + len(chosen)] = chosen
        return BestSplit(best, flags)

    def _gains(self, node: Sums, left: Sums) -> Doubles:
        """Returns the gain of each left side; minus infinity if a side is too light."""
        doubles, right = self._fixed.doubles, Sums(node.g - left.g, node.h - left.h)
        light = np.minimum(doubles(left.h), doubles(right.h)) < self._weight
        empty = (left.h <= 0) | (right.h <= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            score = [
                doubles(sums_.g) ** 2 / (doubles(sums_.h) + self._lambda)
                for sums_ in (left, right, node)
            ]
        return np.where(light | empty, -np.inf, 0.5 * (score[0] + score[1] - score[2]))

    def _best_set(self, node: Sums, of: Sums) -> tuple[float, Bools]:
        """Returns the best gain of a set of categories, and its categories: those with the smallest
        G/H.

        Categories without rows in the node are left out; those with equal ratios stay together.
        """
        chosen, present = np.zeros(len(of.g), bool), np.flatnonzero(of.h > 0)
        ratios = of.g[present] / of.h[present]
        order = np.argsort(ratios, kind="stable")
        present, ratios = present[order], ratios[order]
        ends = np.flatnonzero(np.diff(ratios) > TIE * np.maximum(1.0, np.abs(ratios[:-1])))
        if not len(ends):
            return -np.inf, chosen
        gains = self._gains(
            node, Sums(np.cumsum(of.g[present])[ends], np.cumsum(of.h[present])[ends])
        )
        top = float(gains.max())
        if top == -np.inf:
            return top, chosen
        chosen[present[: ends[np.flatnonzero(gains >= top - TIE * abs(top))[0]] + 1]] = True
        return top, chosen
