"""One tree at the active party while it grows."""

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
    """One tree while it grows.

    ``nodes``: of the routed rows; ``values``: of the leaf that each has reached. ``pairs``: g and h
    of the sampled rows, [R, 2]. ``layout``: of this party's entries, which ``summing`` sums up;
    ``sizes``: of each passive party's. ``sums``: {party: {node: the sums of its entries}} of the
    level before.
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

    def total(self, node: int) -> Sums:
        """Returns the sums of g and h over the sampled rows of an open node."""
        whole = self.pairs[self.nodes[self.rows] == node].sum(axis=0)
        return Sums(whole[:1], whole[1:])

    def fits(self, node: int, sums_: Sums) -> bool:
        """Whether sums of entries can be those of rows in an open node."""
        g_R, h_R = self.pairs[self.nodes[self.rows] == node].T
        return bool(
            (np.abs(sums_.g) <= np.abs(g_R).sum()).all()
            and (sums_.h >= 0).all()
            and (sums_.h <= h_R.sum()).all()
        )

    def adds_up(self, party: str, node: int, sums_: Sums) -> bool:
        """Whether the sums of each of a party's categorical columns contain every row of the node
        exactly once.
        """
        total, ends = self.total(node), np.cumsum(self.sizes[party]).tolist()
        return all(
            sums_.g[begin:end].sum() == total.g[0] and sums_.h[begin:end].sum() == total.h[0]
            for begin, end in itertools.pairwise(ends)
            if begin < end
        )

    def agrees(self, party: str, node: int, flags: Bools, left: Bools) -> bool:
        """Whether the rows that a party sends left have the sums of the split that ``flags`` have
        chosen. ``left``: the sides of all rows in the node.
        """
        goes_left = np.zeros(len(self.nodes), bool)
        goes_left[self.nodes == node] = left
        total = self.pairs[goes_left[self.rows]].sum(axis=0)
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
        return any((total == candidate).all() for candidate in candidates)

    def own_sums(self, present: Sequence[int]) -> dict[int, Sums]:
        """Returns {node: the sums of this party's own entries}."""
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
        """Returns {node: (the owner of its best split, the split)} for the best nodes, as many as
        ``leaves`` allows.
        """
        best_of: dict[int, tuple[str, BestSplit]] = {}
        for node in present:
            total = self.total(node)
            for party, sums_ in entries.items():
                sizes = self.sizes[party] if party in self.sizes else list(self.layout.sizes)
                best = self.gains.best(total, sums_[node], sizes)
                if best is not None and (
                    node not in best_of or _better(best.gain, best_of[node][1].gain)
                ):
                    best_of[node] = party, best
        chosen = sorted(best_of, key=lambda node: (-best_of[node][1].gain, node))
        chosen = chosen[: max(0, self._max_leaves - self.leaves)]
        self.leaves += len(chosen)
        return {node: best_of[node] for node in sorted(chosen)}

    def leaf(self, level: int, node: int) -> None:
        """Makes an open node a leaf."""
        value = self.gains.leaf(self.total(node))
        self.tree.leaves[level, node] = value
        rows = self.nodes == node
        self.values[rows], self.nodes[rows] = value, SETTLED

    def settle(self, level: int, lefts: Mapping[int, Bools]) -> None:
        """Moves the rows of split nodes to the next level; nodes that cannot be split become
        leaves. ``lefts``: {node: whether each of its rows goes left}.
        """
        moved = self.nodes.copy()
        for node, left in lefts.items():
            moved[self.nodes == node] = np.where(left, 2 * node, 2 * node + 1)
        self.nodes[:] = moved
        min_weight = 2 * self.settings.min_child_weight
        for node in sorted(child for parent in lefts for child in (2 * parent, 2 * parent + 1)):
            light = self.gains.weight(self.total(node)) < min_weight
            if level == self.settings.depth or light or self.leaves >= self._max_leaves:
                self.leaf(level, node)

    @property
    def _max_leaves(self) -> int:
        return self.settings.leaves or 1 << self.settings.depth


def _better(gain: float, than: float) -> bool:
    """Whether a gain is better, and not only by rounding."""
    return gain > than + 1e-10 * abs(than)
