"""The state of one tree at the active party while the tree grows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vfl_party.base.seeds import Rows
from vfl_party.homomorphic import Integers
from vfl_party.homomorphic.sums import Summing
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.entries import Layout
from vfl_party.methods.secureboost.tree.forest import Tree
from vfl_party.methods.secureboost.tree.gains import BestSplit, Gains, Sums
from vfl_party.methods.secureboost.tree.objective import Doubles
from vfl_party.methods.secureboost.tree.positions import SETTLED, Bools, Nodes


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
