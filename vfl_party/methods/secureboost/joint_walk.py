"""The joint walk of rows through all trees: at each level the owner of a node's split says left or
right, one bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, PeerError
from vfl_party.base.seeds import Rows
from vfl_party.methods.secureboost.columns import Codes, coded
from vfl_party.methods.secureboost.exchanges import walk
from vfl_party.methods.secureboost.guard import LOST, Answered
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.forest import NAME, Forest, Tree
from vfl_party.methods.secureboost.tree.positions import SETTLED, Bools, Nodes, packed_bytes
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Scored

Places = npt.NDArray[np.int64]
# Rows times trees of a message.
CELLS = 1 << 22


def forest_of(party: Party) -> Forest:
    """Returns the party's trees."""
    found = party.models[NAME]
    assert isinstance(found, Forest)  # noqa: S101 - METHOD makes it
    return found


def rows_at_once(trees: int) -> int:
    """Returns how many rows a message of the walk has, at most."""
    return max(1, CELLS // max(1, trees))


def _place(level: int, node: int) -> int:
    """Returns a node's number in the whole tree: the root is 1, the children of n are 2n and 2n +
    1.
    """
    return (1 << level) + node


def _entrance(tree: Tree, level: int, node: int) -> int:
    """Returns the node to which the party's own answers have sent a row that comes to ``node``, 1
    without any.

    It is the child, on the way to ``node``, of the nearest node above it that the party has split.
    """
    for above in range(level - 1, -1, -1):
        if (above, node >> (level - above)) in tree.splits:
            return _place(above + 1, node >> (level - above - 1))
    return 1


class Walk:
    """A party's ``Scorer``: it walks the rows through all trees with the others.

    ``answered``: what a passive party has been asked before in this run.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: SecureBoostSettings,
        when: str,
        answered: Answered | None = None,
    ) -> None:
        self._party, self._phase, self._depth = party, phase, settings.depth
        self._answered, self._questions = answered or Answered(), 0
        exchange = walk(when)
        self._forest = forest_of(party)
        if party.role == "active":
            self._answering = party.answering(phase, exchange)
        else:
            self._asking = party.asking(phase, exchange)

    def _chunks(self, rows: Rows) -> Iterator[Rows]:
        size = rows_at_once(len(self._forest.trees))
        return (rows[start : start + size] for start in range(0, len(rows), size))

    def _codes(self) -> Codes:
        """Returns the codes of all the party's rows; without columns if it has no features."""
        if self._party.data.columns is None:
            return np.empty((0, 0), np.int8)
        return coded(self._party, self._forest.columns)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Says where the rows go at this party's nodes; see ``Scorer.answer``. Raises PeerError."""
        batch = first.batch
        codes_NF, trees = self._codes(), len(self._forest.trees)
        for chunk in self._chunks(rows):
            bits = np.empty(0, bool)
            path_BT = np.ones((len(chunk), trees), np.int64)
            for level in range(self._depth + 1):
                left = torch.from_numpy(np.packbits(bits))
                last = level == self._depth
                step = StepKey(first.phase, first.round, batch)
                reply = self._asking.swap(
                    step, {"left": left}, rows=0 if last else len(chunk), trees=trees
                )
                batch += 1
                if not last:
                    nodes_BT = reply["nodes"].cpu().numpy()
                    bits = self._own_bits(nodes_BT, level, codes_NF[chunk], path_BT)
                    self._pin(nodes_BT)
        return batch - first.batch

    def _pin(self, nodes_BT: Nodes) -> None:
        """Notes where rows stand. Raises PeerError if they stood elsewhere before an
        interruption.
        """
        self._questions += 1
        if not self._answered.same(f"{self._phase}/walk-{self._questions}", nodes_BT.tobytes()):
            raise self._refused(
                f"for other splits on the ways of rows than before the interruption; {LOST}"
            )

    def _own_bits(self, nodes_BT: Nodes, level: int, codes_BF: Codes, path_BT: Places) -> Bools:
        """Returns a bit for each row and tree: whether it goes left at this party's split; false
        elsewhere.

        ``path_BT``: the number in the whole tree (see ``_place``) of the node to which this party's
        last answer has sent each row, 1 before any; it is moved on. Raises PeerError if a row
        cannot have come to the node in which it is said to stand.
        """
        bits_BT = np.zeros(nodes_BT.shape, bool)
        for number, tree in enumerate(self._forest.trees):
            for node in np.unique(nodes_BT[:, number]).tolist():
                if node == SETTLED:
                    continue
                split = tree.splits.get((level, node))
                if split is None:
                    raise self._refused("for a split of another party")
                rows = np.flatnonzero(nodes_BT[:, number] == node)
                if (path_BT[rows, number] != _entrance(tree, level, node)).any():
                    raise self._refused("for a split to which a row's way does not lead")
                bits_BT[rows, number] = left = split.goes_left(codes_BF[rows])
                path_BT[rows, number] = 2 * _place(level, node) + ~left
        return bits_BT.reshape(-1)

    def _refused(self, what: str) -> PeerError:
        peer = self._party.recipe.active.name
        return PeerError(
            Code.MALFORMED_MESSAGE, f"{peer} asks {self._party.name} {what}", party=peer
        )

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Returns the scores [N, K] of the rows; see ``Scorer.score``. Nobody may be absent."""
        codes_NF, at = self._codes(), first
        found = [np.empty((0, len(self._forest.base)))]
        for chunk in self._chunks(rows):
            codes_BF = codes_NF[chunk] if len(codes_NF) else codes_NF
            scores_BK, at = self._scored(at, len(chunk), codes_BF)
            found.append(scores_BK)
        return Scored(torch.from_numpy(np.concatenate(found)), {}, at.batch - first.batch)

    def _scored(
        self, step: StepKey, count: int, codes_BF: Codes
    ) -> tuple[npt.NDArray[np.float64], StepKey]:
        """Returns the scores [B, K] of a chunk, and the step after it."""
        forest, parties = self._forest, [each.name for each in self._party.recipe.passives]
        trees, outputs = forest.trees, len(forest.base)
        at_BT = np.zeros((count, len(trees)), np.int64)
        settled_BT = np.zeros((count, len(trees)), bool)
        values_BT = np.zeros((count, len(trees)))
        asked: dict[str, Bools] = {}
        for level in range(self._depth + 1):
            packed = packed_bytes(count * len(trees)) if level else 0
            received = self._answering.collect(step, packed=packed) if parties else {}
            if level:
                left_BT = self._own_lefts(level - 1, at_BT, codes_BF)
                for party, tensors in received.items():
                    bits = np.unpackbits(
                        tensors["left"].cpu().numpy(), count=count * len(trees)
                    ).astype(bool)
                    left_BT[asked[party]] = bits.reshape(count, len(trees))[asked[party]]
                at_BT = np.where(settled_BT, at_BT, 2 * at_BT + ~left_BT)
            owners_BT = np.full((count, len(trees)), "", object)
            for number, tree in enumerate(trees):
                for node in np.unique(at_BT[~settled_BT[:, number], number]).tolist():
                    rows = (at_BT[:, number] == node) & ~settled_BT[:, number]
                    if (level, node) in tree.leaves:
                        values_BT[rows, number] = tree.leaves[level, node]
                        settled_BT[rows, number] = True
                    else:
                        owners_BT[rows, number] = tree.owners[level, node]
            asked = {party: owners_BT == party for party in parties}
            last = level == self._depth
            told = {
                party: np.where(mask, at_BT, SETTLED)[: 0 if last else count]
                for party, mask in asked.items()
            }
            replies = {
                party: {"nodes": torch.from_numpy(each.astype(np.uint8))}
                for party, each in told.items()
            }
            if parties:
                self._answering.reply(step, replies)
            step = StepKey(step.phase, step.round, step.batch + 1)
        scores_BK = np.tile(np.array(forest.base), (count, 1))
        # In the order in which they grew, as while training.
        for number in range(len(trees)):
            scores_BK[:, number % outputs] += values_BT[:, number]
        return scores_BK, step

    def _own_lefts(self, level: int, at_BT: npt.NDArray[np.int64], codes_BF: Codes) -> Bools:
        """Returns where rows go left at this party's own splits of a level."""
        left_BT = np.zeros(at_BT.shape, bool)
        for number, tree in enumerate(self._forest.trees):
            for (depth, node), split in tree.splits.items():
                if depth == level:
                    rows = np.flatnonzero(at_BT[:, number] == node)
                    left_BT[rows, number] = split.goes_left(codes_BF[rows])
        return left_BT
