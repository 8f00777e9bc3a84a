"""The messages of two parties for each tree: gradient sums, chosen splits, sides and nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vfl_leaks.scene.scene import Heard, Scene, UnfitError
from vfl_leaks.scene.scores import Classes, Numbers

# Node number of a row that is already in a leaf.
SETTLED = 255
# Size in bytes of a sum that is not encrypted: g and h, int64.
PAIR_BYTES = 16
# Number of trees that attacks use: the first ones, which reveal most.
MAX_TREES = 50

Nodes = npt.NDArray[np.uint8]


@dataclass
class TreeMessages:
    """One tree between the active party and ``passive``, level by level.

    ``sums``: the gradient sums of E candidate splits for each node, int64 [nodes * E, 2]; empty if
    they are encrypted. ``chosen``: a flag for each chosen split, [nodes, E]. ``left``: for the rows
    of the nodes that the passive party splits, packed bits of whether a row goes left. ``nodes``:
    the node of each row on the next level; the last level has none. ``columns``: the column of each
    candidate split, for a judge.
    """

    passive: str
    sums: list[npt.NDArray[np.int64]] = field(default_factory=list)
    chosen: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    left: list[Nodes] = field(default_factory=list)
    nodes: list[Nodes] = field(default_factory=list)
    columns: Classes | None = None
    ended: bool = False

    def add(self, message: Heard) -> None:
        """Adds one message."""
        up, values = message.sender == self.passive, message.tensor.numpy()
        if message.exchange == "sums" and up:
            self.sums.append(_decode_sums(message.tensor))
            if self.columns is None and message.behind is not None:
                self.columns = message.behind.numpy()
        elif message.exchange == "sums":
            self.chosen.append(values.astype(bool))
        elif up:
            self.left.append(values)
        else:
            self.nodes.append(values) if len(values) else None
            self.ended = not len(values) or bool((values == SETTLED).all())

    def before(self, level: int, rows: int) -> Nodes:
        """Returns the node of each row at a level: all are in node 0 of level 0."""
        return self.nodes[level - 1] if level else np.zeros(rows, np.uint8)


def yield_trees(scene: Scene) -> Iterator[TreeMessages]:
    """Yields the trees in the order in which they grew. Raises UnfitError if there are none."""
    unfinished: dict[str, TreeMessages] = {}
    yielded = False
    for message in scene.heard():
        if message.exchange not in ("sums", "partition"):
            continue
        passive = scene.attacker if scene.role == "passive" else _get_peer(message, scene.attacker)
        tree = unfinished.setdefault(passive, TreeMessages(passive))
        tree.add(message)
        if tree.ended:
            yielded = True
            yield unfinished.pop(passive)
    if not yielded:
        raise UnfitError("the parties grow no trees together")


def number_nodes(tree: TreeMessages) -> Classes:
    """Returns a number of the last known node of each row, [N]. All nodes of a tree have different
    numbers.
    """
    places_N = np.ones(len(tree.nodes[0]), np.int64)
    for level, nodes_N in enumerate(tree.nodes, 1):
        inside = nodes_N != SETTLED
        places_N[inside] = (1 << level) + nodes_N[inside].astype(np.int64)
    return places_N


def compute_sides(tree: TreeMessages, rows: int) -> list[Numbers]:
    """Returns the sides of all rows, [N], for each split of the passive party: 1 for left, -1 for
    right, 0 if the row is not in the split node.
    """
    all_sides = []
    for level, (chosen, left) in enumerate(zip(tree.chosen, tree.left, strict=True)):
        nodes_N = tree.before(level, rows)
        present = [node for node in np.unique(nodes_N).tolist() if node != SETTLED]
        split_nodes = [node for node, flags in zip(present, chosen, strict=True) if flags.any()]
        rows_of_nodes = [np.flatnonzero(nodes_N == node) for node in split_nodes]
        bits = np.unpackbits(left, count=sum(map(len, rows_of_nodes))).astype(bool)
        for node_rows in rows_of_nodes:
            goes_left, bits = bits[: len(node_rows)], bits[len(node_rows) :]
            side_N = np.zeros(rows)
            side_N[node_rows] = np.where(goes_left, 1.0, -1.0)
            all_sides.append(side_N)
    return all_sides


def _get_peer(message: Heard, attacker: str) -> str:
    return message.sender if message.receiver == attacker else message.receiver


def _decode_sums(sums: Tensor) -> npt.NDArray[np.int64]:
    wire = np.ascontiguousarray(sums.numpy())
    if wire.ndim != 2 or wire.shape[1] != PAIR_BYTES:
        return np.empty((0, 2), np.int64)
    return wire.view("<i8").astype(np.int64).reshape(len(wire), 2)
