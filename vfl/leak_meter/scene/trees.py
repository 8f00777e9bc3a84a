"""The messages of two parties for each tree: sums, chosen entries, sides, and nodes of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vfl.leak_meter.scene.scene import Heard, Scene, UnfitError
from vfl.leak_meter.scene.scores import Classes, Numbers

# Value in place of a node for a row in a leaf.
SETTLED = 255
# Size of a sum that is not encrypted: g and h, int64.
PAIR_BYTES = 16
# Number of trees that attacks use: the first ones, which reveal most.
MAX_TREES = 50

Nodes = npt.NDArray[np.uint8]


@dataclass
class TreeMessages:
    """One tree between the active party and ``passive``, level by level.

    ``sums``: of entries, node after node, int64 [nodes * E, 2]; empty if they are encrypted.
    ``chosen``: flags [nodes, E]. ``left``: packed bits of the rows of the passive party's nodes.
    ``nodes``: of all rows, of the next level; none of the last. ``columns``: of each number's
    entry, for a judge.
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
            self.sums.append(_pairs(message.tensor))
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


def trees_of(scene: Scene) -> Iterator[TreeMessages]:
    """Yields the trees in the order in which they grew. Raises UnfitError if none did."""
    open_: dict[str, TreeMessages] = {}
    some = False
    for message in scene.heard():
        if message.exchange not in ("sums", "partition"):
            continue
        passive = scene.attacker if scene.role == "passive" else _other(message, scene.attacker)
        tree = open_.setdefault(passive, TreeMessages(passive))
        tree.add(message)
        if tree.ended:
            some = True
            yield open_.pop(passive)
    if not some:
        raise UnfitError("the parties grow no trees together")


def places(tree: TreeMessages) -> Classes:
    """Returns the last node in which each row is known to be, [N]: no two nodes have the same
    number.
    """
    places_N = np.ones(len(tree.nodes[0]), np.int64)
    for level, nodes_N in enumerate(tree.nodes, 1):
        inside = nodes_N != SETTLED
        places_N[inside] = (1 << level) + nodes_N[inside].astype(np.int64)
    return places_N


def sides(tree: TreeMessages, rows: int) -> list[Numbers]:
    """Returns [N] for each split of the passive party: 1 to the left, -1 to the right, 0 if the row
    is not there.
    """
    sides_ = []
    for level, (chosen, left) in enumerate(zip(tree.chosen, tree.left, strict=True)):
        nodes_N = tree.before(level, rows)
        present = [node for node in np.unique(nodes_N).tolist() if node != SETTLED]
        won = [node for node, flags in zip(present, chosen, strict=True) if flags.any()]
        where = [np.flatnonzero(nodes_N == node) for node in won]
        bits = np.unpackbits(left, count=sum(map(len, where))).astype(bool)
        for inside in where:
            own, bits = bits[: len(inside)], bits[len(inside) :]
            side_N = np.zeros(rows)
            side_N[inside] = np.where(own, 1.0, -1.0)
            sides_.append(side_N)
    return sides_


def _other(message: Heard, attacker: str) -> str:
    return message.sender if message.receiver == attacker else message.receiver


def _pairs(sums: Tensor) -> npt.NDArray[np.int64]:
    wire = np.ascontiguousarray(sums.numpy())
    if wire.ndim != 2 or wire.shape[1] != PAIR_BYTES:
        return np.empty((0, 2), np.int64)
    return wire.view("<i8").astype(np.int64).reshape(len(wire), 2)
