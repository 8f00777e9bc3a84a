"""Label inference by a malicious passive party: the columns that it offers to trees are invented,
and new on each level.

No check can distinguish a column of invented bins from a true one. The active party answers with
the best split of each node, so an answer reveals log2 of the number of splits in bits about labels.
The attacker draws its bins so that a side has few rows: winning sides have the rarer class, whose
gradients are larger. A row's score grows with each small side that it is on. For comparison, an
oracle uses the leaves' values, which only the active party has.

The trees are grown here from the true labels, with as many splits as the party offers in the
rehearsal. The active party's own columns are left out, because they win most nodes. So the figure
is an approximate maximum of what such columns reveal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vfl.leak_meter.scene.scene import Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Classes, Numbers, fold_auc
from vfl.leak_meter.scene.trees import MAX_TREES, trees_of
from vfl_party.base.seeds import derive_seed
from vfl_party.base.statistics import auc

# Learning rate, and the default regularisation and minimum weight.
_RATE, _LAMBDA, _WEIGHT = 0.3, 1.0, 1.0
# Approximate numbers of rows on the left sides that a column offers.
_SIZES = (8, 16)

Bools = npt.NDArray[np.bool_]


def play(scene: Scene) -> list[Figure]:
    """Returns the AUC of labels by sides alone, and by the leaves. Raises UnfitError if there are
    not two classes.
    """
    if scene.classes != 2:
        raise UnfitError("the attack supports only two classes")
    trees = [tree for tree in trees_of(scene) if tree.chosen][:MAX_TREES]
    splits = max((tree.chosen[0].shape[1] for tree in trees), default=0)
    if not splits:
        raise UnfitError("the party offers no splits")
    labels_N = scene.labels[scene.rows["train"]].numpy() == 1
    random = np.random.default_rng(derive_seed(scene.seed, "inventions"))
    lie = Lie(labels_N, random)
    for _ in trees:
        lie.grow(splits, max(len(tree.chosen) for tree in trees))
    shuffled_N = random.permutation(labels_N)
    by = {"": lie.sides, ", leaves' values (an oracle)": lie.scores}
    return [
        Figure(
            "labels",
            f"invented splits, {len(trees)} trees{more}",
            "AUC",
            fold_auc(auc(score_N, labels_N)),
            chance=fold_auc(auc(score_N, shuffled_N)),
            batches=1,
        )
        for more, score_N in by.items()
    ]


@dataclass
class Lie:
    """Trees on invented columns, as an honest active party grows them, and what they tell of each
    row.

    ``labels``: of the rows, [N]. ``scores``: log-odds. ``sides``: what the liar makes of the sides
    alone.
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
        """Grows a tree on ``splits`` invented splits of each level."""
        p_N = 1 / (1 + np.exp(-self.scores))
        pairs = p_N - self.labels, p_N * (1 - p_N)
        nodes_N = np.zeros(len(p_N), np.int64)
        for level in range(depth):
            left_N = self._best(nodes_N, 1 << level, pairs, splits)
            nodes_N = 2 * nodes_N + ~left_N
        g, h = (np.bincount(nodes_N, each_N, 1 << depth) for each_N in pairs)
        self.scores -= _RATE * (g / (h + _LAMBDA))[nodes_N]

    def _best(
        self, nodes_N: Classes, nodes: int, pairs: tuple[Numbers, Numbers], splits: int
    ) -> Bools:
        """Returns whether each row goes left at the best invented split of its node; in a node
        without one, all do.
        """
        rows = np.bincount(nodes_N, minlength=nodes)
        bins = len(_SIZES) + 1
        totals = [_sums(nodes_N, each_N, nodes)[:, None] for each_N in pairs]
        best, left_N = np.full(nodes, -np.inf), np.ones(len(nodes_N), bool)
        for _ in range(max(1, splits // len(_SIZES))):
            bin_N = np.searchsorted(_SIZES, self.random.random(len(nodes_N)) * rows[nodes_N])
            at_N = nodes_N * bins + bin_N
            sums = [_sums(at_N, each_N, nodes * bins).reshape(nodes, bins) for each_N in pairs]
            gains = _gains([sums_.cumsum(axis=1)[:, :-1] for sums_ in sums], totals)
            cut, better = gains.argmax(axis=1), gains.max(axis=1) > best
            best = np.where(better, gains.max(axis=1), best)
            left_N = np.where(better[nodes_N], bin_N <= cut[nodes_N], left_N)
        on_left = np.bincount(nodes_N, left_N, nodes)
        self.sides += (left_N - (on_left / rows.clip(min=1))[nodes_N]) / np.sqrt(
            on_left.clip(min=1)
        )[nodes_N]
        return left_N


def _sums(places_N: Classes, values_N: Numbers, count: int) -> Numbers:
    """Returns the sum of the values at each of ``count`` places."""
    return np.bincount(places_N, values_N, count).astype(np.float64)


def _gains(left: list[Numbers], node: list[Numbers]) -> Numbers:
    """Returns XGBoost's gain of each left side, except for what all sides of a node share."""
    sides = [left, [node[0] - left[0], node[1] - left[1]]]
    gains: Numbers = sum(g**2 / (h + _LAMBDA) for g, h in sides)  # type: ignore[assignment]
    light = np.minimum(*(h for _, h in sides)) < _WEIGHT
    return np.where(light, -np.inf, gains)


ATTACK = Attack(
    "labels from the splits that win among invented ones", "passive", play, "secureboost"
)
