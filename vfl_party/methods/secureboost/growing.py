"""One tree at the active party while it grows: the loss, the training rows of a round, the best
split of a node, and the state of the tree.

GOSS (LightGBM, Ke et al. 2017) keeps the rows with the largest gradients, draws some of the
remaining rows, and weights these so that they represent all remaining rows. Only the active party
knows gradients, so it sends the rows to the passive parties.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vfl_common.config.task import TaskSettings
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation
from vfl_party.homomorphic import Integers
from vfl_party.homomorphic.sums import Summing
from vfl_party.methods.secureboost.columns import Layout
from vfl_party.methods.secureboost.forest import SETTLED, Bools, Nodes, Tree
from vfl_party.methods.secureboost.settings import GossSettings, SecureBoostSettings

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


# The relative difference below which two gains, or two ratios of g to h, count as equal. The first
# of equal ones wins.
TIE = 1e-10
# A gain must exceed ``min_gain`` by more than this, because rounding gives useless splits a small
# gain.
MIN_GAIN = 1e-9


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


@dataclass
class GrowingTree:
    """One tree while it grows, at the active party.

    ``nodes``: the node of each routed row. ``values``: the value of the leaf that each row has
    reached. ``pairs``: g and h of the sampled rows, [R, 2]. ``layout``: the active party's entries,
    for which ``summing`` computes sums. ``sizes``: {passive party: its numbers of entries}.
    ``sums``: {party: {node: the sums of its entries}} of the previous level.
    """

    tree: Tree
    settings: SecureBoostSettings
    gains: Gains
    rows: Rows
    pairs: Integers
    nodes: Nodes
    values: Doubles
    layout: Layout
    summing: Summing
    sizes: dict[str, list[int]]
    in_sample: Bools
    sums: dict[str, dict[int, Sums]] = field(default_factory=dict)
    leaves: int = 1

    def sum_node(self, node: int) -> Sums:
        """Returns the sums of g and h over the sampled rows of an open node."""
        whole = self.pairs[self.nodes[self.rows] == node].sum(axis=0)
        return Sums(whole[:1], whole[1:])

    def are_possible(self, node: int, sums_: Sums) -> bool:
        """Whether sums of entries are possible for the rows of an open node."""
        g_R, h_R = self.pairs[self.nodes[self.rows] == node].T
        return bool(
            (np.abs(sums_.g) <= np.abs(g_R).sum()).all()
            and (sums_.h >= 0).all()
            and (sums_.h <= h_R.sum()).all()
        )

    def add_up(self, party: str, node: int, sums_: Sums) -> bool:
        """Whether the sums of each of a party's categorical columns contain every row of the node
        exactly once.
        """
        total, ends = self.sum_node(node), np.cumsum(self.sizes[party]).tolist()
        return all(
            sums_.g[begin:end].sum() == total.g[0] and sums_.h[begin:end].sum() == total.h[0]
            for begin, end in itertools.pairwise(ends)
            if begin < end
        )

    def agrees(self, party: str, node: int, flags: Bools, left: Bools) -> bool:
        """Whether the rows that a party sends left match the sums of the split that ``flags`` have
        chosen. ``left``: whether each row of the node goes left.
        """
        goes_left = np.zeros(len(self.nodes), bool)
        goes_left[self.nodes == node] = left
        sum_node = self.pairs[goes_left[self.rows]].sum(axis=0)
        entries, sizes = self.sums[party][node], self.sizes[party]
        pairs = np.stack([entries.g, entries.h], axis=1)
        candidates = list(pairs[: sizes[0]][flags[: sizes[0]]])
        if not candidates:
            ends = itertools.pairwise(np.cumsum(sizes).tolist())
            candidates = [
                pairs[begin:end][flags[begin:end]].sum(axis=0)
                for begin, end in ends
                if flags[begin:end].any()
            ]
        return any((sum_node == candidate).all() for candidate in candidates)

    def compute_own_sums(self, present: Sequence[int]) -> dict[int, Sums]:
        """Returns {node: the sums of the active party's own entries}."""
        none = np.empty(0, np.int64)
        if not self.layout.entries:
            return {node: Sums(none, none) for node in present}
        nodes_R = self.nodes[self.rows]
        sums_ = self.summing.sums([np.flatnonzero(nodes_R == node) for node in present])
        return {
            node: Sums(pairs[:, 0], pairs[:, 1]) for node, pairs in zip(present, sums_, strict=True)
        }

    def best_splits(
        self, present: Sequence[int], entries: Mapping[str, Mapping[int, Sums]]
    ) -> dict[int, tuple[str, BestSplit]]:
        """Returns {node: (the owner of its best split, the split)} for the nodes with the largest
        gains, as many as ``leaves`` allows.
        """
        best_by_node: dict[int, tuple[str, BestSplit]] = {}
        for node in present:
            sum_node = self.sum_node(node)
            for party, sums_ in entries.items():
                sizes = self.sizes[party] if party in self.sizes else list(self.layout.sizes)
                best = self.gains.find_best(sum_node, sums_[node], sizes)
                if best is not None and (
                    node not in best_by_node or _is_better(best.gain, best_by_node[node][1].gain)
                ):
                    best_by_node[node] = party, best
        chosen_nodes = sorted(best_by_node, key=lambda node: (-best_by_node[node][1].gain, node))
        chosen_nodes = chosen_nodes[: max(0, self._max_leaves - self.leaves)]
        self.leaves += len(chosen_nodes)
        return {node: best_by_node[node] for node in sorted(chosen_nodes)}

    def make_leaf(self, level: int, node: int) -> None:
        """Makes an open node a leaf."""
        value = self.gains.compute_leaf(self.sum_node(node))
        self.tree.leaves[level, node] = value
        rows = self.nodes == node
        self.values[rows], self.nodes[rows] = value, SETTLED

    def settle(self, level: int, lefts: Mapping[int, Bools]) -> None:
        """Moves the rows of split nodes to the next level, where nodes that cannot be split become
        leaves. ``lefts``: {node: whether each of its rows goes left}.
        """
        moved = self.nodes.copy()
        for node, left in lefts.items():
            moved[self.nodes == node] = np.where(left, 2 * node, 2 * node + 1)
        self.nodes[:] = moved
        min_weight = 2 * self.settings.min_child_weight
        for node in sorted(child for parent in lefts for child in (2 * parent, 2 * parent + 1)):
            light = self.gains.sum_h(self.sum_node(node)) < min_weight
            if level == self.settings.depth or light or self.leaves >= self._max_leaves:
                self.make_leaf(level, node)

    @property
    def _max_leaves(self) -> int:
        return self.settings.leaves or 1 << self.settings.depth


def _is_better(gain: float, best_gain: float) -> bool:
    """Whether a gain is larger by more than rounding."""
    return gain > best_gain + 1e-10 * abs(best_gain)


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
