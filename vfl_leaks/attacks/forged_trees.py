"""Attacks on trees by a malicious party that respects the limits that the other party checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from vfl_leaks.attacks.trees import MAX_TREES, TreeMessages, yield_trees
from vfl_leaks.fitting import r2_by_column
from vfl_leaks.pairs import count_known
from vfl_leaks.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scores import Classes, Numbers, fold_auc
from vfl_party.base.seeds import derive_seed
from vfl_party.base.statistics import auc

# Number of marked rows in a node. A sum has 128 bits, and some of them count rows.
MARKS = 100
# Minimum number of rows on a side, by default for a binary task.
_MIN_ROWS = 4


# Feature reconstruction by a malicious active party that respects the limits that a passive party
# checks: the numbers of trees, levels and sides.
#
# There are two attacks. In the first, the active party names arbitrary winners instead of the best
# splits. Each split then reveals on which side of a threshold the rows of the node are. The
# attacker chooses the most informative threshold. In the second, it encrypts marks instead of
# gradients: a separate bit for each of some rows. Each sum reveals which marked rows it contains,
# and thus their bins in every column. The attacker distributes the rows over the nodes of the last
# level by its own columns, and marks the same number of rows in each node.
#
# The attacker must know which sum belongs to which threshold. It could infer this from marks that
# count rows, because bins are quantiles; this module assumes that it knows. A value is estimated as
# the mean of the known rows (the same rows as in the attack ``columns``) in the possible bins.
def play_probes(scene: Scene) -> list[Figure]:
    """Returns the mean R² of numeric columns for each passive party and each of the two attacks.
    Raises UnfitError if no passive party offers numeric columns.
    """
    trees: dict[str, list[TreeMessages]] = {}
    for tree in yield_trees(scene):
        of_party = trees.setdefault(tree.passive, [])
        if len(of_party) < MAX_TREES:
            of_party.append(tree)
    figures = [
        figure
        for passive, of_party in trees.items()
        for figure in _yield_figures(scene, passive, of_party)
    ]
    if not figures:
        raise UnfitError("no passive party offers splits of columns of numbers")
    return figures


def _yield_figures(scene: Scene, passive: str, trees: list[TreeMessages]) -> Iterator[Figure]:
    """Yields the figures of the two attacks on one party's columns."""
    train, inputs = scene.rows["train"], scene.columns.get(passive)
    column_of_sum = next(
        (tree.columns for tree in trees if tree.columns is not None and len(tree.columns)), None
    )
    if inputs is None or column_of_sum is None:
        return
    depth = max(len(tree.chosen) for tree in trees)
    values_NF = (
        inputs.values[torch.from_numpy(train).to(inputs.values.device)].cpu().double().numpy()
    )
    splits_F = np.bincount(column_of_sum, minlength=values_NF.shape[1])[: values_NF.shape[1]]
    used = np.flatnonzero((splits_F > 0) & (values_NF.std(axis=0) > 0))
    if not len(used):
        return
    order_N = np.random.default_rng(derive_seed(scene.seed, "probes")).permutation(len(train))
    values_NF = values_NF[order_N][:, used]
    bins_F = (splits_F[used] + 1).tolist()
    bins_NF = np.stack(
        [_compute_bins(x_N, bins) for x_N, bins in zip(values_NF.T, bins_F, strict=True)], axis=1
    )
    search = BinSearch(bins_NF)
    for _ in trees:
        search.grow(depth)
    marked = count_known(len(train)) + MARKS * (1 << (depth - 1)) * len(trees)
    exact_N = np.arange(len(train)) < marked
    low_NF, high_NF = (
        np.where(exact_N[:, None], bins_NF, 0),
        np.where(exact_N[:, None], bins_NF, bins_NF.max(axis=0)),
    )
    count = f"{len(trees)} trees"
    template = Figure(f"{passive}: mean of columns", "", "R²", 0.0, chance=0.0, batches=1)
    bounds = {
        f"winners of its choice, {count}": search.known,
        f"marks in gradients, {count}": (low_NF, high_NF),
    }
    for knows, bins in bounds.items():
        yield replace(template, knows=knows, value=_compute_mean_r2(values_NF, bins_NF, *bins))


def _compute_bins(x_N: Numbers, bins: int) -> Classes:
    """Returns the quantile bin of each value, of at most ``bins`` bins. Equal values are in the
    same bin.
    """
    ordered = np.sort(x_N)
    cuts = np.unique(ordered[np.arange(1, bins) * len(ordered) // bins])
    _, bins_N = np.unique(np.searchsorted(cuts, x_N, side="right"), return_inverse=True)
    return bins_N.astype(np.int64)


@dataclass
class BinSearch:
    """Searches the rows' ``bins``, [N, F]. ``known``: the lowest and the highest possible bin of
    each row and column.
    """

    bins: Classes
    known: tuple[Classes, Classes] = field(init=False)

    def __post_init__(self) -> None:
        high_NF = np.broadcast_to(self.bins.max(axis=0), self.bins.shape).copy()
        self.known = np.zeros_like(self.bins), high_NF

    def grow(self, depth: int) -> None:
        """Grows a tree in which each node has the most informative split."""
        groups = [np.arange(len(self.bins))]
        for _ in range(depth):
            groups = [side for rows in groups for side in self._split(rows)]

    def _split(self, rows: Classes) -> list[Classes]:
        """Splits a node at the most informative threshold, and narrows the possible bins of its
        rows. A node that is too small is not split.
        """
        bits = [self._compute_bits(rows, column) for column in range(self.bins.shape[1])]
        column = int(np.argmax([bits_T.max() for bits_T in bits]))
        below = int(bits[column].argmax()) + 1
        if bits[column].max() <= 0:
            return [rows]
        left = self.bins[rows, column] < below
        low_NF, high_NF = self.known
        high_NF[rows[left], column] = np.minimum(high_NF[rows[left], column], below - 1)
        low_NF[rows[~left], column] = np.maximum(low_NF[rows[~left], column], below)
        return [rows[left], rows[~left]]

    def _compute_bits(self, rows: Classes, column: int) -> Numbers:
        """Returns the expected information of each threshold of a column about all rows in bits; 0
        if a side would have too few rows.

        All possible bins of a row are assumed to be equally likely.
        """
        bins = int(self.bins[:, column].max()) + 1
        low_R, high_R = (bound[rows, column] for bound in self.known)
        counts = np.bincount(low_R * bins + high_R, minlength=bins * bins).reshape(bins, bins)
        lows, highs = np.nonzero(counts)
        below = np.arange(1, bins)
        share = ((below - lows[:, None]) / (highs - lows + 1)[:, None]).clip(1e-12, 1 - 1e-12)
        bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
        on_left = np.bincount(self.bins[rows, column], minlength=bins).cumsum()[:-1]
        is_small = np.minimum(on_left, len(rows) - on_left) < _MIN_ROWS
        bits_T: Numbers = np.where(is_small, 0.0, (counts[lows, highs][:, None] * bits).sum(axis=0))
        return np.where(bits_T < 1e-3, 0.0, bits_T)


def _compute_mean_r2(
    values_NF: Numbers, bins_NF: Classes, low_NF: Classes, high_NF: Classes
) -> float:
    """Returns the mean R² over columns. Each value is estimated as the mean of the known rows in
    its possible bins. The known rows come first.
    """
    known, guess_NF = count_known(len(values_NF)), np.empty_like(values_NF)
    for column in range(values_NF.shape[1]):
        bins_N, x_N = bins_NF[:, column], values_NF[:, column]
        counts, sums = (
            np.bincount(bins_N[:known], weights, bins_N.max() + 1)
            for weights in (None, x_N[:known])
        )
        counts, sums = (np.concatenate([[0.0], np.cumsum(sums_)]) for sums_ in (counts, sums))
        low_N, above_N = low_NF[:, column], high_NF[:, column] + 1
        count_N, sum_N = (sums_[above_N] - sums_[low_N] for sums_ in (counts, sums))
        guess_NF[:, column] = np.where(count_N > 0, sum_N / count_N.clip(min=1), x_N[:known].mean())
    pair = (torch.from_numpy(values[known:]).float() for values in (guess_NF, values_NF))
    return float(np.mean(r2_by_column(*pair)))


PROBES = Attack(
    "columns from splits of the active party's choice, or from marks",
    "active",
    play_probes,
    "secureboost",
)


# The learning rate, and the default regularisation and minimum child weight.
_RATE, _LAMBDA, _WEIGHT = 0.3, 1.0, 1.0


# Approximate numbers of rows on the left sides of the splits of a column.
_SIZES = (8, 16)


Bools = npt.NDArray[np.bool_]


# Label inference by a malicious passive party, which offers invented columns to the trees and new
# columns for each level.
#
# No check can distinguish invented bins from true bins. The active party answers with the best
# split of each node, so an answer with S offered splits reveals up to log2(S) bits about the
# labels. The attacker draws its bins so that one side of a split has few rows. The winning small
# sides contain the rarer class, whose gradients are larger. A row's score grows with each small
# side that contains it. For comparison, an oracle uses the leaves' values, which only the active
# party has.
#
# The attack grows the trees itself from the true labels, with as many splits as the party offers in
# the rehearsal. The active party's own columns are left out, because they would win most nodes. The
# figure is therefore an approximate maximum of the leak.
def play_inventions(scene: Scene) -> list[Figure]:
    """Returns the AUC of the labels by the sides of rows alone, and by the leaves' values. Raises
    UnfitError if there are not two classes.
    """
    if scene.classes != 2:
        raise UnfitError("the attack supports only two classes")
    trees = [tree for tree in yield_trees(scene) if tree.chosen][:MAX_TREES]
    splits = max((tree.chosen[0].shape[1] for tree in trees), default=0)
    if not splits:
        raise UnfitError("the party offers no splits")
    labels_N = scene.labels[scene.rows["train"]].numpy() == 1
    random = np.random.default_rng(derive_seed(scene.seed, "inventions"))
    invented = InventedTrees(labels_N, random)
    for _ in trees:
        invented.grow(splits, max(len(tree.chosen) for tree in trees))
    shuffled_N = random.permutation(labels_N)
    scores = {"": invented.sides, ", leaves' values (an oracle)": invented.scores}
    return [
        Figure(
            "labels",
            f"invented splits, {len(trees)} trees{suffix}",
            "AUC",
            fold_auc(auc(score_N, labels_N)),
            chance=fold_auc(auc(score_N, shuffled_N)),
            batches=1,
        )
        for suffix, score_N in scores.items()
    ]


@dataclass
class InventedTrees:
    """Trees that an honest active party grows on invented columns.

    ``labels``: the labels of the rows, [N]. ``scores``: the log-odds of each row by the leaves'
    values. ``sides``: the attacker's score of each row, from the sides alone.
    """

    labels: Bools
    random: np.random.Generator
    scores: Numbers = field(init=False)
    sides: Numbers = field(init=False)

    def __post_init__(self) -> None:
        share = self.labels.mean().clip(1e-6, 1 - 1e-6)
        self.scores = np.full(len(self.labels), np.log(share / (1 - share)))
        self.sides = np.zeros(len(self.labels))

    def grow(self, splits: int, depth: int) -> None:
        """Grows a tree with ``splits`` invented splits on each level."""
        p_N = 1 / (1 + np.exp(-self.scores))
        pairs = p_N - self.labels, p_N * (1 - p_N)
        nodes_N = np.zeros(len(p_N), np.int64)
        for level in range(depth):
            left_N = self._split_nodes(nodes_N, 1 << level, pairs, splits)
            nodes_N = 2 * nodes_N + ~left_N
        g, h = (np.bincount(nodes_N, each_N, 1 << depth) for each_N in pairs)
        self.scores -= _RATE * (g / (h + _LAMBDA))[nodes_N]

    def _split_nodes(
        self, nodes_N: Classes, nodes: int, pairs: tuple[Numbers, Numbers], splits: int
    ) -> Bools:
        """Returns whether each row goes left at the best invented split of its node. In a node
        without a valid split, all rows go left.
        """
        rows = np.bincount(nodes_N, minlength=nodes)
        bins = len(_SIZES) + 1
        totals = [_sum_by_place(nodes_N, each_N, nodes)[:, None] for each_N in pairs]
        best, left_N = np.full(nodes, -np.inf), np.ones(len(nodes_N), bool)
        for _ in range(max(1, splits // len(_SIZES))):
            bin_N = np.searchsorted(_SIZES, self.random.random(len(nodes_N)) * rows[nodes_N])
            at_N = nodes_N * bins + bin_N
            sums = [
                _sum_by_place(at_N, each_N, nodes * bins).reshape(nodes, bins) for each_N in pairs
            ]
            gains = _compute_gains([sums_.cumsum(axis=1)[:, :-1] for sums_ in sums], totals)
            cut, better = gains.argmax(axis=1), gains.max(axis=1) > best
            best = np.where(better, gains.max(axis=1), best)
            left_N = np.where(better[nodes_N], bin_N <= cut[nodes_N], left_N)
        on_left = np.bincount(nodes_N, left_N, nodes)
        self.sides += (left_N - (on_left / rows.clip(min=1))[nodes_N]) / np.sqrt(
            on_left.clip(min=1)
        )[nodes_N]
        return left_N


def _sum_by_place(places_N: Classes, values_N: Numbers, count: int) -> Numbers:
    """Returns the sum of the rows' values at each of ``count`` places."""
    return np.bincount(places_N, values_N, count).astype(np.float64)


def _compute_gains(left: list[Numbers], node: list[Numbers]) -> Numbers:
    """Returns XGBoost's gain of each split, without the term that is the same for all splits of a
    node.
    """
    sides = [left, [node[0] - left[0], node[1] - left[1]]]
    gains: Numbers = sum(g**2 / (h + _LAMBDA) for g, h in sides)  # type: ignore[assignment]
    light = np.minimum(*(h for _, h in sides)) < _WEIGHT
    return np.where(light, -np.inf, gains)


INVENTIONS = Attack(
    "labels from the splits that win among invented ones", "passive", play_inventions, "secureboost"
)
