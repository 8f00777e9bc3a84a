"""Moves ids through all trees while the model is served: one question per level, and one bit from
the owner of the split that an id has reached.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from vfl_party.methods.secureboost.columns import Codes, encode_cells
from vfl_party.methods.secureboost.descent import PLACE, Descent, FlatForest, unpack_bits
from vfl_party.methods.secureboost.exchanges import walk
from vfl_party.methods.secureboost.joint_walk import forest_of, make_forest_map
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.methods.secureboost.tree.positions import SETTLED, Bools, bytes_for_bits
from vfl_party.phases.context import Party
from vfl_party.phases.online import AnswerStep, Ask, Cells, Outcome, StepAnswer

# The length of the level in a question. A question consists of the level (one byte) and the nodes
# (one byte for each id and tree).
_LEVEL_BYTES = 1


class OnlineWalk:
    """Scores ids while the model is served; see ``vfl_party.phases.online.Online``. An object is
    valid as long as the forest does not change.
    """

    def __init__(self, party: Party, settings: SecureBoostSettings) -> None:
        self._forest, self._depth = forest_of(party), settings.depth
        self.exchange = walk("when an id is asked for")
        self.bytes_of_row = max(1, len(self._forest.trees))
        self._flat = FlatForest(self._forest, self._depth)
        self._map = make_forest_map(party, self._depth) if party.role == "active" else None

    def score(self, cells: Cells | None, n: int, ask: Ask) -> Outcome:
        """Scores ids; see ``Online.score``. An id is lost if the party whose split it has reached
        does not have it.
        """
        forest_map = self._map
        assert forest_map is not None  # noqa: S101 - the active party scores
        codes_NF: Codes = np.empty((n, 0), np.int8)
        if cells is not None:
            codes_NF = encode_cells(self._forest.columns, *cells)
        descent = Descent(forest_map, codes_NF, n)
        lost = {party: np.zeros(n, bool) for party in forest_map.passives}
        size, known = bytes_for_bits(n * forest_map.flat.trees), dict[str, Bools]()
        # The first question goes to all parties, to find out which ids each of them has.
        asked = list(forest_map.passives)
        while not descent.is_done:
            questions = {
                party: bytes([descent.level]) + descent.get_nodes(party).tobytes()
                for party in asked
            }
            replies = ask(questions, size) if questions else {}
            known |= {party: reply.known for party, reply in replies.items()}
            for party in forest_map.passives:
                has_id_N = known.get(party, np.zeros(n, bool))
                if party in questions and party not in replies:
                    has_id_N = known[party] = np.zeros(n, bool)
                lost_N = descent.find_at_splits(party).any(axis=1) & ~has_id_N
                lost[party] |= lost_N
                descent.stop(lost_N)
            descent.move(
                {
                    party: unpack_bits(
                        np.frombuffer(reply.answered, np.uint8), n, forest_map.flat.trees
                    )
                    for party, reply in replies.items()
                }
            )
            asked = [party for party in forest_map.passives if descent.find_at_splits(party).any()]
        return Outcome(torch.from_numpy(descent.compute_scores()), lost)

    def answering(self, cells: Cells, known: npt.NDArray[np.bool_]) -> AnswerStep:
        """Returns a function that answers for the splits on an id's path; see
        ``Online.answering``.
        """
        return _OnlineAnswers(
            self._flat, self._depth, encode_cells(self._forest.columns, *cells), known
        )


class _OnlineAnswers:
    """A passive party's side for N ids, of which it knows B."""

    def __init__(self, flat: FlatForest, depth: int, codes_BF: Codes, known_N: Bools) -> None:
        self._flat, self._depth, self._codes_BF, self._known_N = flat, depth, codes_BF, known_N
        self._path_BT = np.ones((len(codes_BF), flat.trees), PLACE)
        self._level = -1

    def __call__(self, asked: bytes) -> StepAnswer:
        n, trees = len(self._known_N), self._flat.trees
        if len(asked) != _LEVEL_BYTES + n * trees:
            raise ValueError(
                f"the request has the wrong size for {trees:,} trees (got {len(asked):,} bytes)"
            )
        level = asked[0]
        if not self._level < level < self._depth:
            raise ValueError(f"the level is out of order (got {level})")
        self._level = level
        nodes_NT = np.frombuffer(asked, np.uint8, offset=_LEVEL_BYTES).reshape(n, trees)
        bits_NT = np.zeros((n, trees), bool)
        bits_NT[self._known_N] = self._flat.answer(
            level, nodes_NT[self._known_N], self._codes_BF, self._path_BT
        )
        # The number of bits about each id: one for each tree in which it has reached a split of
        # this party.
        bits_N = ((nodes_NT != SETTLED) & self._known_N[:, None]).sum(axis=1)
        return StepAnswer(np.packbits(bits_NT).tobytes(), bits_N)
