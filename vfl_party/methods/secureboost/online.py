"""The walk of ids through all trees while the model is served: one question per level, and one bit
from the owner of the split that an id has reached.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vfl_party.methods.secureboost.columns import Codes, codes_of
from vfl_party.methods.secureboost.descent import PLACE, Descent, FlatForest, unpack_bits
from vfl_party.methods.secureboost.exchanges import walk
from vfl_party.methods.secureboost.joint_walk import forest_of, map_of
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.positions import SETTLED, Bools, bytes_for_bits
from vfl_party.phases.context import Party
from vfl_party.phases.online import AnswerStep, Ask, Cells, Outcome, Stepped

# A question is the level, one byte, and then the nodes, one byte for each id and tree.
_LEVEL = 1


class OnlineWalk:
    """See ``vfl_party.phases.online.Online``. Valid as long as the forest does not change."""

    def __init__(self, party: Party, settings: SecureBoostSettings) -> None:
        self._forest, self._depth = forest_of(party), settings.depth
        self.exchange = walk("when an id is asked for")
        self.bytes_of_row = max(1, len(self._forest.trees))
        self._flat = FlatForest(self._forest, self._depth)
        self._map = map_of(party, self._depth) if party.role == "active" else None

    def score(self, cells: Cells | None, n: int, ask: Ask) -> Outcome:
        """See ``Online.score``: an id needs the party at whose split it stands."""
        of = self._map
        assert of is not None  # noqa: S101 - the active party scores
        codes_NF: Codes = np.empty((n, 0), np.int8)
        if cells is not None:
            codes_NF = codes_of(self._forest.columns, *cells)
        descent = Descent(of, codes_NF, n)
        lost = {party: np.zeros(n, bool) for party in of.passives}
        size, known = bytes_for_bits(n * of.flat.trees), dict[str, Bools]()
        # The first level asks all parties, to find out which ids each of them has.
        asked = list(of.passives)
        while not descent.done:
            questions = {
                party: bytes([descent.level]) + descent.nodes(party).tobytes() for party in asked
            }
            replies = ask(questions, size) if questions else {}
            known |= {party: reply.known for party, reply in replies.items()}
            for party in of.passives:
                there_N = known.get(party, np.zeros(n, bool))
                if party in questions and party not in replies:
                    there_N = known[party] = np.zeros(n, bool)
                lost_N = descent.here(party).any(axis=1) & ~there_N
                lost[party] |= lost_N
                descent.stop(lost_N)
            descent.move(
                {
                    party: unpack_bits(np.frombuffer(reply.answered, np.uint8), n, of.flat.trees)
                    for party, reply in replies.items()
                }
            )
            asked = [party for party in of.passives if descent.here(party).any()]
        return Outcome(torch.from_numpy(descent.scores()), lost)

    def answering(self, cells: Cells, known: npt.NDArray[np.bool_]) -> AnswerStep:
        """See ``Online.answering``: answers for the splits to which an id's own way leads."""
        return _Answering(self._flat, self._depth, codes_of(self._forest.columns, *cells), known)


class _Answering:
    """A passive party's side of the walk of N ids, of which it knows B."""

    def __init__(self, flat: FlatForest, depth: int, codes_BF: Codes, known_N: Bools) -> None:
        self._flat, self._depth, self._codes_BF, self._known_N = flat, depth, codes_BF, known_N
        self._path_BT = np.ones((len(codes_BF), flat.trees), PLACE)
        self._level = -1

    def __call__(self, asked: bytes) -> Stepped:
        n, trees = len(self._known_N), self._flat.trees
        if len(asked) != _LEVEL + n * trees:
            raise ValueError(
                f"with a request of the wrong size for {trees:,} trees (got {len(asked):,} bytes)"
            )
        level = asked[0]
        if not self._level < level < self._depth:
            raise ValueError("for a level out of order")
        self._level = level
        nodes_NT = np.frombuffer(asked, np.uint8, offset=_LEVEL).reshape(n, trees)
        bits_NT = np.zeros((n, trees), bool)
        bits_NT[self._known_N] = self._flat.answer(
            level, nodes_NT[self._known_N], self._codes_BF, self._path_BT
        )
        # A bit for each tree in which the id stands at a split of this party.
        bits_N = ((nodes_NT != SETTLED) & self._known_N[:, None]).sum(axis=1)
        return Stepped(np.packbits(bits_NT).tobytes(), bits_N)
