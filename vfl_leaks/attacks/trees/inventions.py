"""Label inference by a malicious passive party, which offers invented columns to the trees and new
columns for each level.

No check can distinguish invented bins from true bins. The active party answers with the best split
of each node, so an answer with S offered splits reveals up to log2(S) bits about the labels. The
attacker draws its bins so that one side of a split has few rows. The winning small sides contain
the rarer class, whose gradients are larger. A row's score grows with each small side that contains
it. For comparison, an oracle uses the leaves' values, which only the active party has.

The attack grows the trees itself from the true labels, with as many splits as the party offers in
the rehearsal. The active party's own columns are left out, because they would win most nodes. The
figure is therefore an approximate maximum of the leak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Classes, Numbers, fold_auc
from vfl_leaks.scene.trees import MAX_TREES, yield_trees
from vfl_party.base.seeds import derive_seed
from vfl_party.base.statistics import auc

# The learning rate, and the default regularisation and minimum child weight.
_RATE, _LAMBDA, _WEIGHT = 0.3, 1.0, 1.0
# Approximate numbers of rows on the left sides of the splits of a column.
_SIZES = (8, 16)

Bools = npt.NDArray[np.bool_]


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack(
    "labels from the splits that win among invented ones", "passive", play, "secureboost"
)
