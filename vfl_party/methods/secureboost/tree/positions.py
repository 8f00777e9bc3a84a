"""The positions of rows while a tree grows, that is, each row's node in the current level. All
parties know them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vfl_party.base.seeds import Rows

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
