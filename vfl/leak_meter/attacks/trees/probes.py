"""Feature reconstruction by a malicious active party within the limits that a passive party checks:
the numbers of trees, levels and sides.

It attacks in two ways. It names arbitrary winners: each split of a node then reveals on which side
of a chosen threshold all rows of the node are, and it chooses the most informative one. Or it
encrypts marks in place of gradients, a separate bit for each of some rows, and reads from each sum
which of them are in it, and thus their bins in every column. It divides the rows among the nodes of
the last level by its own columns, and marks the same number in each node.

It must know which entry belongs to which threshold. Marks that count rows reveal that, because bins
are quantiles; here it is given. Values are estimated as the mean of the known rows (as many as in
``columns``) in the bins that remain possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from vfl.leak_meter.learn.fitting import r2_by_column
from vfl.leak_meter.scene.pairs import count_known
from vfl.leak_meter.scene.scene import Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Classes, Numbers
from vfl.leak_meter.scene.trees import MAX_TREES, TreeMessages, trees_of
from vfl_party.base.seeds import derive_seed

# Number of marked rows of a node: a sum has 128 bits, of which some count rows.
MARKS = 100
# Minimum number of rows on a side, by the defaults of a binary task.
_MIN_ROWS = 4


def play(scene: Scene) -> list[Figure]:
    """Returns R² of the mean of columns of numbers, for each passive party and lie. Raises
    UnfitError without any.
    """
    trees: dict[str, list[TreeMessages]] = {}
    for tree in trees_of(scene):
        own = trees.setdefault(tree.passive, [])
        if len(own) < MAX_TREES:
            own.append(tree)
    figures = [figure for passive, own in trees.items() for figure in _figures(scene, passive, own)]
    if not figures:
        raise UnfitError("no passive party offers splits of columns of numbers")
    return figures


def _figures(scene: Scene, passive: str, trees: list[TreeMessages]) -> Iterator[Figure]:
    """Yields the figures of both lies about one party's columns."""
    train, inputs = scene.rows["train"], scene.columns.get(passive)
    of = next(
        (tree.columns for tree in trees if tree.columns is not None and len(tree.columns)), None
    )
    if inputs is None or of is None:
        return
    depth = max(len(tree.chosen) for tree in trees)
    values_NF = (
        inputs.values[torch.from_numpy(train).to(inputs.values.device)].cpu().double().numpy()
    )
    splits_F = np.bincount(of, minlength=values_NF.shape[1])[: values_NF.shape[1]]
    used = np.flatnonzero((splits_F > 0) & (values_NF.std(axis=0) > 0))
    if not len(used):
        return
    order_N = np.random.default_rng(derive_seed(scene.seed, "probes")).permutation(len(train))
    values_NF = values_NF[order_N][:, used]
    bins_F = (splits_F[used] + 1).tolist()
    bins_NF = np.stack(
        [_bins(x_N, bins) for x_N, bins in zip(values_NF.T, bins_F, strict=True)], axis=1
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
    like = Figure(f"{passive}: mean of columns", "", "R²", 0.0, chance=0.0, batches=1)
    lies = {
        f"winners of its choice, {count}": search.known,
        f"marks in gradients, {count}": (low_NF, high_NF),
    }
    for knows, known in lies.items():
        yield replace(like, knows=knows, value=_mean_r2(values_NF, bins_NF, *known))


def _bins(x_N: Numbers, bins: int) -> Classes:
    """Returns the number of each value's bin, of ``most`` quantiles; equal values are in one
    bin.
    """
    ordered = np.sort(x_N)
    cuts = np.unique(ordered[np.arange(1, bins) * len(ordered) // bins])
    _, bins_N = np.unique(np.searchsorted(cuts, x_N, side="right"), return_inverse=True)
    return bins_N.astype(np.int64)


@dataclass
class BinSearch:
    """Bounds of the rows' ``bins``, [N, F]: ``known``, the lowest and the highest that each
    can be.
    """

    bins: Classes
    known: tuple[Classes, Classes] = field(init=False)

    def __post_init__(self) -> None:
        high_NF = np.broadcast_to(self.bins.max(axis=0), self.bins.shape).copy()
        self.known = np.zeros_like(self.bins), high_NF

    def grow(self, depth: int) -> None:
        """Grows a tree in which each node is split where that tells most."""
        groups = [np.arange(len(self.bins))]
        for _ in range(depth):
            groups = [side for rows in groups for side in self._split(rows)]

    def _split(self, rows: Classes) -> list[Classes]:
        """Splits a node, and notes what its rows tell; a node that is too small stays as it is."""
        tells = [self._tells(rows, column) for column in range(self.bins.shape[1])]
        column = int(np.argmax([tell.max() for tell in tells]))
        below = int(tells[column].argmax()) + 1
        if tells[column].max() <= 0:
            return [rows]
        left = self.bins[rows, column] < below
        low_NF, high_NF = self.known
        high_NF[rows[left], column] = np.minimum(high_NF[rows[left], column], below - 1)
        low_NF[rows[~left], column] = np.maximum(low_NF[rows[~left], column], below)
        return [rows[left], rows[~left]]

    def _tells(self, rows: Classes, column: int) -> Numbers:
        """Returns the bits that each threshold of a column tells of all rows, as the liar expects;
        0 if a side is few.

        A bin is as likely as another one of those that are possible.
        """
        bins = int(self.bins[:, column].max()) + 1
        low_R, high_R = (bound[rows, column] for bound in self.known)
        counts = np.bincount(low_R * bins + high_R, minlength=bins * bins).reshape(bins, bins)
        lows, highs = np.nonzero(counts)
        below = np.arange(1, bins)
        share = ((below - lows[:, None]) / (highs - lows + 1)[:, None]).clip(1e-12, 1 - 1e-12)
        bits = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
        on_left = np.bincount(self.bins[rows, column], minlength=bins).cumsum()[:-1]
        few = np.minimum(on_left, len(rows) - on_left) < _MIN_ROWS
        bits_T: Numbers = np.where(few, 0.0, (counts[lows, highs][:, None] * bits).sum(axis=0))
        return np.where(bits_T < 1e-3, 0.0, bits_T)


def _mean_r2(values_NF: Numbers, bins_NF: Classes, low_NF: Classes, high_NF: Classes) -> float:
    """Returns R² of the values that the possible bins stand for, mean of the columns; the first
    rows are known ones.
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
