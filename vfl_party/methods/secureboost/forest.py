"""Moves rows down all trees, level by level, where each party computes its part. Training,
prediction and serving share this code.

A party knows its own splits, and the active party also the leaves and the owners of splits. Trees
are the state of a torch module, so that checkpoints, prediction and exported models treat them like
weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.methods.secureboost.columns import ELSEWHERE, Codes, Column

# The value that marks a row in a leaf, instead of a node.
SETTLED = 255
Nodes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


def list_open_nodes(nodes_N: Nodes) -> list[int]:
    """Returns the nodes of a level that may be split, ascending."""
    return [node for node in np.unique(nodes_N).tolist() if node != SETTLED]


def choose_summed_nodes(nodes_N: Nodes, in_sample_N: Bools) -> list[int]:
    """Returns the open nodes whose sums are computed: of two siblings, the node with fewer rows in
    the sample, or the left one if equal. The sums of its sibling are the parent's sums minus these.
    """
    counts = np.bincount(nodes_N[in_sample_N], minlength=256)
    present = list_open_nodes(nodes_N)
    return [
        node
        for node in present
        if node ^ 1 not in present or (counts[node], node & 1) < (counts[node ^ 1], (node ^ 1) & 1)
    ]


def rows_of_nodes(nodes_N: Nodes, nodes: list[int]) -> Rows:
    """Returns the rows in each of ``nodes``, one node after the other."""
    return np.concatenate(
        [np.empty(0, np.int64), *(np.flatnonzero(nodes_N == node) for node in nodes)]
    )


def bytes_for_bits(bits: int) -> int:
    """Returns the number of bytes for ``bits`` bits."""
    return -(-bits // 8)


# A node: (level, number in the level). The children of n are 2n and 2n + 1 in the next level.
Node = tuple[int, int]
# The key of the forest in ``Party.models``.
NAME = "trees"


@dataclass(frozen=True)
class TreeSplit:
    """A split on one of the party's own columns. ``left``: whether each code goes left."""

    column: int
    left: tuple[bool, ...]
    # Whether cells with any other code go left.
    default: bool

    def goes_left(self, codes_BF: Codes) -> npt.NDArray[np.bool_]:
        """Returns whether each row goes left."""
        codes_B = codes_BF[:, self.column]
        left_by_code = np.array(self.left, bool)[codes_B.clip(min=0)]
        left: npt.NDArray[np.bool_] = np.where(codes_B == ELSEWHERE, self.default, left_by_code)
        return left


@dataclass
class Tree:
    """One tree. ``splits``: this party's own splits. ``owners``, ``gains``, ``leaves``: of all
    nodes, only at the active party.
    """

    splits: dict[Node, TreeSplit] = field(default_factory=dict)
    owners: dict[Node, str] = field(default_factory=dict)
    gains: dict[Node, float] = field(default_factory=dict)
    leaves: dict[Node, float] = field(default_factory=dict)


class Forest(nn.Module):
    """All trees of one party. ``base``: the scores before the first tree, at the active party."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[Column] = []
        self.base: list[float] = []
        self.trees: list[Tree] = []

    def importance(self) -> dict[str, float]:
        """Returns the gain of each of this party's columns. A passive party, which does not know
        gains, gets the number of splits instead.
        """
        gains: dict[str, float] = {}
        for tree in self.trees:
            for node, split in tree.splits.items():
                name = self.columns[split.column].name
                gains[name] = gains.get(name, 0.0) + tree.gains.get(node, 1.0)
        return dict(sorted(gains.items(), key=lambda item: -item[1]))

    def get_extra_state(self) -> Tensor:
        """Returns columns and trees as bytes of JSON."""
        trees = [[_to_lists(part) for part in asdict(tree).values()] for tree in self.trees]
        text = json.dumps(
            {
                "columns": [asdict(column) for column in self.columns],
                "base": self.base,
                "trees": trees,
            }
        )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Restores the trees that ``get_extra_state`` returned. Raises InputError if they cannot be
        read.
        """
        try:
            tree = json.loads(bytes(state.numpy()))
            self.columns = [
                Column(
                    column["name"],
                    None if column["cuts"] is None else tuple(column["cuts"]),
                    column["missing"],
                    tuple(column["categories"]),
                )
                for column in tree["columns"]
            ]
            self.base = tree["base"]
            self.trees = []
            for splits, owners, gains, leaves in tree["trees"]:
                own_splits = {
                    (a, b): TreeSplit(s["column"], tuple(s["left"]), s["default"])
                    for a, b, s in splits
                }
                node_values = (
                    {(a, b): value for a, b, value in part} for part in (owners, gains, leaves)
                )
                self.trees.append(Tree(own_splits, *node_values))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                Code.CHECKPOINT_INVALID,
                "the checkpoint contains trees that cannot be read. Use the checkpoint of the run "
                "that trained them.",
            ) from None


def _to_lists(part: dict[Node, Any]) -> list[list[Any]]:
    return [[*node, value] for node, value in part.items()]


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
