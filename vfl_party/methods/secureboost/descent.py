"""Moves rows down all trees, level by level, where each party computes its part. Training,
prediction and serving share this code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vfl_party.methods.secureboost.columns import Codes
from vfl_party.methods.secureboost.tree.forest import Forest, Node, Tree, TreeSplit
from vfl_party.methods.secureboost.tree.positions import SETTLED, Bools, Nodes

Places = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
# The dtype of a node's number in the whole tree.
PLACE = np.int16
# Marks a node that has no split of this party, or a node without an owner.
_NO_SPLIT = -1


def _number_node(level: int, node: int) -> int:
    """Returns a node's number in the whole tree, where the root is 1 and the children of n are 2n
    and 2n + 1.
    """
    return (1 << level) + node


def _entrance(tree: Tree, level: int, node: int) -> int:
    """Returns the number of the node to which this party's last answer has sent a row that reaches
    ``node``; 1 without earlier answers.

    This node is the child, on the path to ``node``, of the nearest ancestor that the party has
    split.
    """
    for ancestor_level in range(level - 1, -1, -1):
        if (ancestor_level, node >> (level - ancestor_level)) in tree.splits:
            return _number_node(ancestor_level + 1, node >> (level - ancestor_level - 1))
    return 1


class FlatForest:
    """A party's own splits of a forest as arrays, which move many rows at once."""

    def __init__(self, forest: Forest, depth: int) -> None:
        self.trees = len(forest.trees)
        splits: list[tuple[int, Node, TreeSplit, int]] = [
            (tree_number, node, split, _entrance(tree, *node))
            for tree_number, tree in enumerate(forest.trees)
            for node, split in tree.splits.items()
        ]
        codes = max((len(split.left) for _, _, split, _ in splits), default=0)
        # One array per level: the number of the split of each tree and node.
        self._number = [np.full((self.trees, 1 << level), _NO_SPLIT) for level in range(depth)]
        self._column_S = np.array([split.column for _, _, split, _ in splits], np.int64)
        self._entrance_S = np.array([entrance for *_, entrance in splits], np.int64)
        # The second index is the code plus 1. Index 0 is for values that do not occur in training.
        self._left_SC = np.zeros((len(splits), 1 + codes), bool)
        for split_number, (tree_number, (level, node), split, _) in enumerate(splits):
            self._number[level][tree_number, node] = split_number
            self._left_SC[split_number, 0] = split.default
            self._left_SC[split_number, 1 : 1 + len(split.left)] = split.left

    def find_left(self, level: int, at_BT: Places, here_BT: Bools, codes_BF: Codes) -> Bools:
        """Returns whether each row goes left at a split of this party, bool [B, T]; false
        elsewhere.

        ``at_BT``: each row's node in the level. ``here_BT``: whether a row has reached a split of
        this party.
        """
        rows, trees = np.nonzero(here_BT)
        splits = self._number[level][trees, at_BT[rows, trees]]
        lefts_BT = np.zeros(at_BT.shape, bool)
        lefts_BT[rows, trees] = self._goes_left(splits, rows, codes_BF)
        return lefts_BT

    def answer(
        self, level: int, nodes_BT: Nodes, codes_BF: Codes, path_BT: npt.NDArray[np.int16]
    ) -> Bools:
        """Returns whether each row goes left at a split of this party, bool [B, T]; false
        elsewhere.

        ``path_BT``: the node to which this party's last answer has sent each row, as a number in
        the whole tree (``_number_node``), or 1 before the first answer. The method updates it.
        Raises ValueError if a row cannot have reached its node.
        """
        rows, trees = np.nonzero(nodes_BT != SETTLED)
        nodes = nodes_BT[rows, trees].astype(np.int64)
        inside = nodes < 1 << level
        splits = np.where(inside, self._number[level][trees, np.where(inside, nodes, 0)], _NO_SPLIT)
        if (splits == _NO_SPLIT).any():
            raise ValueError("a row is not at a split of this party")
        if (path_BT[rows, trees] != self._entrance_S[splits]).any():
            raise ValueError("a row cannot have reached its split")
        left = self._goes_left(splits, rows, codes_BF)
        path_BT[rows, trees] = 2 * _number_node(level, 0) + 2 * nodes + ~left
        bits_BT = np.zeros(nodes_BT.shape, bool)
        bits_BT[rows, trees] = left
        return bits_BT

    def _goes_left(self, splits: Places, rows: Places, codes_BF: Codes) -> Bools:
        codes = codes_BF[rows, self._column_S[splits]].astype(np.int64)
        left: Bools = self._left_SC[splits, 1 + codes]
        return left


class ForestMap:
    """The active party's part of all trees as arrays: the leaves and the owner of each split."""

    def __init__(self, forest: Forest, depth: int, active: str, passives: Sequence[str]) -> None:
        self.flat, self.base = FlatForest(forest, depth), forest.base
        self.depth, self.passives = depth, tuple(passives)
        number_by_party = {
            name: tree_number for tree_number, name in enumerate((active, *passives))
        }
        shapes = [(self.flat.trees, 1 << level) for level in range(depth + 1)]
        self.leaves = [np.full(shape, np.nan) for shape in shapes]
        self.owners = [np.full(shape, _NO_SPLIT) for shape in shapes]
        for tree_number, tree in enumerate(forest.trees):
            for (level, node), value in tree.leaves.items():
                self.leaves[level][tree_number, node] = value
            for (level, node), owner in tree.owners.items():
                self.owners[level][tree_number, node] = number_by_party[owner]


class Descent:
    """The active party's side of moving B rows down all trees.

    ``codes_BF``: the active party's codes of these rows.
    """

    def __init__(self, forest_map: ForestMap, codes_BF: Codes, count: int) -> None:
        self._map, self._codes_BF, self.level = forest_map, codes_BF, 0
        shape = (count, forest_map.flat.trees)
        self._at_BT, self._values_BT = np.zeros(shape, np.int64), np.zeros(shape)
        self._settled_BT, self._trees_T = np.zeros(shape, bool), np.arange(forest_map.flat.trees)
        self._owner_BT = np.full(shape, _NO_SPLIT)
        self._update_positions()

    @property
    def is_done(self) -> bool:
        """Whether the rows have reached the last level."""
        return self.level == self._map.depth

    def _update_positions(self) -> None:
        """Updates the owner of the split that each row has reached, and the rows that are in
        leaves.
        """
        leaves, owners = self._map.leaves[self.level], self._map.owners[self.level]
        value_BT = leaves[self._trees_T, self._at_BT]
        new_BT = ~self._settled_BT & ~np.isnan(value_BT)
        self._values_BT[new_BT] = value_BT[new_BT]
        self._settled_BT |= new_BT
        self._owner_BT = np.where(self._settled_BT, _NO_SPLIT, owners[self._trees_T, self._at_BT])

    def find_at_splits(self, party: str) -> Bools:
        """Returns whether each row is at a split of a passive party in each tree, bool [B, T]."""
        at_splits_BT: Bools = self._owner_BT == 1 + self._map.passives.index(party)
        return at_splits_BT

    def get_nodes(self, party: str) -> Nodes:
        """Returns the nodes of rows at splits of a passive party, uint8 [B, T]; ``SETTLED``
        elsewhere.
        """
        return np.where(self.find_at_splits(party), self._at_BT, SETTLED).astype(np.uint8)

    def stop(self, rows_B: Bools) -> None:
        """Stops rows at their current nodes, so that no party is asked about them any more."""
        self._settled_BT[rows_B] = True
        self._owner_BT[rows_B] = _NO_SPLIT

    def move(self, lefts: Mapping[str, Bools]) -> None:
        """Moves the rows to the next level. ``lefts``: {passive party: whether each row goes left,
        [B, T]}.
        """
        left_BT = self._map.flat.find_left(
            self.level, self._at_BT, self._owner_BT == 0, self._codes_BF
        )
        for party, answer_BT in lefts.items():
            left_BT |= answer_BT & self.find_at_splits(party)
        # The node of a row that is already in a leaf has no effect.
        self._at_BT = np.where(self._settled_BT, 0, 2 * self._at_BT + ~left_BT)
        self.level += 1
        self._update_positions()

    def compute_scores(self) -> Doubles:
        """Returns the scores of the rows, [B, K], after they have reached the last level."""
        base = self._map.base
        scores_BK = np.tile(np.array(base), (len(self._values_BT), 1))
        # Trees are added in the order in which they grew, so that rounding is the same as in
        # training.
        for number in range(self._values_BT.shape[1]):
            scores_BK[:, number % len(base)] += self._values_BT[:, number]
        return scores_BK


def unpack_bits(packed: npt.NDArray[np.uint8], rows: int, trees: int) -> Bools:
    """Unpacks the bits of an answer, [rows, trees]."""
    return np.unpackbits(packed, count=rows * trees).astype(bool).reshape(rows, trees)
