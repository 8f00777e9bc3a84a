"""One tree at the active party while it grows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from vfl_party.base.seeds import Rows
from vfl_party.methods.secureboost.homomorphic import Integers
from vfl_party.methods.secureboost.tree.entries import Layout, Plan
from vfl_party.methods.secureboost.tree.forest import Tree
from vfl_party.methods.secureboost.tree.gains import Gains, Sums
from vfl_party.methods.secureboost.tree.objective import Doubles
from vfl_party.methods.secureboost.tree.positions import Bools, Nodes


@dataclass
class GrowingTree:
    """One tree while it grows.

    ``nodes``: of the routed rows; ``values``: of the leaf that each has reached. ``pairs``: g and h
    of the sampled rows, [R, 2]. ``layout``, ``plan``: of this party's entries; ``sizes``: of each
    passive party's. ``sums``: {party: {node: the sums of its entries}} of the level before.
    """

    tree: Tree
    gains: Gains
    rows: Rows
    pairs: Integers
    nodes: Nodes
    values: Doubles
    layout: Layout
    plan: Plan
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
        """Whether the categories of each of a party's columns have all rows of the node, and each
        row once.
        """
        total, ends = self.total(node), np.cumsum(self.sizes[party]).tolist()
        return all(
            sums_.g[begin:end].sum() == total.g[0] and sums_.h[begin:end].sum() == total.h[0]
            for begin, end in itertools.pairwise(ends)
            if begin < end
        )

    def agrees(self, party: str, node: int, flags: Bools, left: Bools) -> bool:
        """Whether the rows that a party sends left have the sums of a split that it was told with
        ``flags``.

        ``left``: of all rows in the node.
        """
        goes_left = np.zeros(len(self.nodes), bool)
        goes_left[self.nodes == node] = left
        found = self.pairs[goes_left[self.rows]].sum(axis=0)
        entries, sizes = self.sums[party][node], self.sizes[party]
        pairs = np.stack([entries.g, entries.h], axis=1)
        told = list(pairs[: sizes[0]][flags[: sizes[0]]])
        if not told:
            ends = itertools.pairwise(np.cumsum(sizes).tolist())
            told = [
                pairs[begin:end][flags[begin:end]].sum(axis=0)
                for begin, end in ends
                if flags[begin:end].any()
            ]
        return any((found == each).all() for each in told)
