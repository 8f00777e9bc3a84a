"""One tree at the active party while it grows."""

from __future__ import annotations

from dataclasses import dataclass, field

from vfl_party.homomorphic import Integers
from vfl_party.methods.secureboost.entries import Layout, Plan
from vfl_party.methods.secureboost.forest import Tree
from vfl_party.methods.secureboost.gains import Gains, Sums
from vfl_party.methods.secureboost.growth import Bools, Nodes
from vfl_party.methods.secureboost.objective import Doubles
from vfl_party.seeds import Rows


@dataclass
class Growing:
    """One tree while it grows.

    ``nodes``: of the routed rows; ``values``: of the leaf that each has reached. ``pairs``: g and h of the
    sampled rows, [R, 2]. ``layout``, ``plan``: of this party's entries; ``sizes``: of each passive party's. ``sums``:
    {party: {node: the sums of its entries}} of the level before.
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
