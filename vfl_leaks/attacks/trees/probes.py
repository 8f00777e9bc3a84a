"""Feature reconstruction by a malicious active party that respects the limits that a passive party
checks: the numbers of trees, levels and sides.

There are two attacks. In the first, the active party names arbitrary winners instead of the best
splits. Each split then reveals on which side of a threshold the rows of the node are. The attacker
chooses the most informative threshold. In the second, it encrypts marks instead of gradients: a
separate bit for each of some rows. Each sum reveals which marked rows it contains, and thus their
bins in every column. The attacker distributes the rows over the nodes of the last level by its own
columns, and marks the same number of rows in each node.

The attacker must know which sum belongs to which threshold. It could infer this from marks that
count rows, because bins are quantiles; this module assumes that it knows. A value is estimated as
the mean of the known rows (the same rows as in the attack ``columns``) in the possible bins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vfl_leaks.learn.fitting import r2_by_column
from vfl_leaks.scene.pairs import count_known
from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Classes, Numbers
from vfl_leaks.scene.trees import MAX_TREES, TreeMessages, yield_trees
from vfl_party.base.seeds import derive_seed

# Number of marked rows in a node. A sum has 128 bits, and some of them count rows.
MARKS = 100
# Minimum number of rows on a side, by default for a binary task.
_MIN_ROWS = 4


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack(
    "columns from splits of the active party's choice, or from marks", "active", play, "secureboost"
)
