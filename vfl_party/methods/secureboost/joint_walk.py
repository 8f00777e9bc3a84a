"""The joint walk of rows through all trees: at each level the owner of a node's split answers left
or right, one bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, PeerError
from vfl_party.base.seeds import Rows
from vfl_party.methods.secureboost.columns import Codes, encode_rows
from vfl_party.methods.secureboost.descent import (
    PLACE,
    Descent,
    Doubles,
    FlatForest,
    ForestMap,
    unpack_bits,
)
from vfl_party.methods.secureboost.exchanges import walk
from vfl_party.methods.secureboost.guard import LOST_FOLDER, AnswerLog
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.forest import NAME, Forest
from vfl_party.methods.secureboost.tree.positions import SETTLED, Nodes, bytes_for_bits
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Scored

# The most rows times trees of a message.
CELLS = 1 << 22


def forest_of(party: Party) -> Forest:
    """Returns the party's trees."""
    forest = party.models[NAME]
    assert isinstance(forest, Forest)  # noqa: S101 - METHOD makes it
    return forest


def map_of(party: Party, depth: int) -> ForestMap:
    """Returns what the active party knows of its trees."""
    recipe = party.recipe
    passives = [passive.name for passive in recipe.passives]
    return ForestMap(forest_of(party), depth, recipe.active.name, passives)


def rows_at_once(trees: int) -> int:
    """Returns the maximum number of rows of a message of the walk."""
    return max(1, CELLS // max(1, trees))


class Walk:
    """A party's ``Scorer``, which walks the rows through all trees with the other parties.

    ``answered``: what a passive party has been asked before in this run.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: SecureBoostSettings,
        when: str,
        answered: AnswerLog | None = None,
    ) -> None:
        self._party, self._phase, self._depth = party, phase, settings.depth
        self._answered, self._questions = answered or AnswerLog(), 0
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
        return encode_rows(self._party, self._forest.columns)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Answers where rows go at this party's splits; see ``Scorer.answer``. Raises PeerError."""
        batch = first.batch
        codes_NF, flat = self._codes(), FlatForest(self._forest, self._depth)
        trees = flat.trees
        for chunk in self._chunks(rows):
            bits, about = np.empty(0, bool), np.empty(0, np.int64)
            path_BT = np.ones((len(chunk), trees), PLACE)
            for level in range(self._depth + 1):
                left = torch.from_numpy(np.packbits(bits))
                last = level == self._depth
                step = StepKey(first.phase, first.round, batch)
                reply = self._asking.swap(
                    step, {"left": left}, about, rows=0 if last else len(chunk), trees=trees
                )
                batch += 1
                if not last:
                    nodes_BT = reply["nodes"].cpu().numpy()
                    # Each row is listed once per bit; settled rows have no bits.
                    about = np.repeat(chunk, (nodes_BT != SETTLED).sum(axis=1))
                    try:
                        bits = flat.answer(level, nodes_BT, codes_NF[chunk], path_BT).reshape(-1)
                    except ValueError as error:
                        raise self._refuse(str(error)) from None
                    self._pin(nodes_BT)
        return batch - first.batch

    def _pin(self, nodes_BT: Nodes) -> None:
        """Logs the positions of rows. Raises PeerError if they differ from those before an
        interruption.
        """
        self._questions += 1
        if not self._answered.same(f"{self._phase}/walk-{self._questions}", nodes_BT.tobytes()):
            raise self._refuse(
                f"for other splits on the paths of rows than before the interruption. {LOST_FOLDER}"
            )

    def _refuse(self, what: str) -> PeerError:
        peer = self._party.recipe.active.name
        return PeerError(
            Code.MALFORMED_MESSAGE, f"{peer} asks {self._party.name} {what}", party=peer
        )

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Returns the scores [N, K] of the rows; see ``Scorer.score``. No party may be absent."""
        codes_NF, at = self._codes(), first
        of = map_of(self._party, self._depth)
        scores = [np.empty((0, len(self._forest.base)))]
        for chunk in self._chunks(rows):
            codes_BF = codes_NF[chunk] if len(codes_NF) else codes_NF
            scores_BK, at = self._score(of, at, chunk, codes_BF)
            scores.append(scores_BK)
        return Scored(torch.from_numpy(np.concatenate(scores)), {}, at.batch - first.batch)

    def _score(
        self, of: ForestMap, step: StepKey, chunk: Rows, codes_BF: Codes
    ) -> tuple[Doubles, StepKey]:
        """Returns the scores [B, K] of the rows of a chunk, and the step after it."""
        count, parties, trees = len(chunk), of.passives, of.flat.trees
        descent = Descent(of, codes_BF, count)
        for level in range(self._depth + 1):
            packed = bytes_for_bits(count * trees) if level else 0
            received = self._answering.collect(step, packed=packed) if parties else {}
            if level:
                lefts = {
                    party: unpack_bits(tensors["left"].cpu().numpy(), count, trees)
                    for party, tensors in received.items()
                }
                descent.move(lefts)
            rows = 0 if level == self._depth else count
            if parties:
                nodes = {party: torch.from_numpy(descent.nodes(party)[:rows]) for party in parties}
                replies = {party: {"nodes": positions} for party, positions in nodes.items()}
                self._answering.reply(step, replies, about=chunk)
            step = StepKey(step.phase, step.round, step.batch + 1)
        return descent.scores(), step
