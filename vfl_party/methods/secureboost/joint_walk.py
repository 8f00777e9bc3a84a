"""Moves rows jointly through all trees. At each level, the owner of a node's split answers with one
bit: left or right. While the model is served, ids move in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, PeerError
from vfl_party.base.seeds import Rows
from vfl_party.methods.secureboost.columns import Codes, encode_cells, encode_rows
from vfl_party.methods.secureboost.forest import (
    NAME,
    PLACE,
    SETTLED,
    Bools,
    Descent,
    Doubles,
    FlatForest,
    Forest,
    ForestMap,
    Nodes,
    bytes_for_bits,
    unpack_bits,
)
from vfl_party.methods.secureboost.guard import LOST_FOLDER, AnswerLog
from vfl_party.methods.secureboost.settings import SecureBoostSettings, walk
from vfl_party.phases.context import Party
from vfl_party.phases.online import AnswerStep, Ask, Cells, Outcome, StepAnswer
from vfl_party.phases.scoring import Scored

# The maximum number of rows times trees in a message.
CELLS = 1 << 22


def forest_of(party: Party) -> Forest:
    """Returns the party's forest."""
    forest = party.models[NAME]
    assert isinstance(forest, Forest)  # noqa: S101 - METHOD makes it
    return forest


def make_forest_map(party: Party, depth: int) -> ForestMap:
    """Makes the arrays of the active party's part of all trees."""
    recipe = party.recipe
    passives = [passive.name for passive in recipe.passives]
    return ForestMap(forest_of(party), depth, recipe.active.name, passives)


def rows_at_once(trees: int) -> int:
    """Returns the maximum number of rows in a message when rows move through ``trees`` trees."""
    return max(1, CELLS // max(1, trees))


class Walk:
    """A party's ``Scorer``, which moves the rows through all trees jointly with the other parties.

    ``answered``: the log of the questions that a passive party has answered in this run.
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
            self._answering = party.exchanges.open_answering(phase, exchange)
        else:
            self._asking = party.exchanges.open_asking(phase, exchange)

    def _chunks(self, rows: Rows) -> Iterator[Rows]:
        size = rows_at_once(len(self._forest.trees))
        return (rows[start : start + size] for start in range(0, len(rows), size))

    def _encode_rows(self) -> Codes:
        """Returns the codes of all rows of the party; an empty array if the party has no
        features.
        """
        if self._party.rows.data.columns is None:
            return np.empty((0, 0), np.int8)
        return encode_rows(self._party, self._forest.columns)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Answers where rows go at this party's splits; see ``Scorer.answer``. Raises PeerError if
        the active party asks for a wrong split.
        """
        batch = first.batch
        codes_NF, flat = self._encode_rows(), FlatForest(self._forest, self._depth)
        trees = flat.trees
        for chunk in self._chunks(rows):
            bits, described_rows = np.empty(0, bool), np.empty(0, np.int64)
            path_BT = np.ones((len(chunk), trees), PLACE)
            for level in range(self._depth + 1):
                left = torch.from_numpy(np.packbits(bits))
                is_last = level == self._depth
                step = StepKey(first.phase, first.round, batch)
                reply = self._asking.swap(
                    step,
                    {"left": left},
                    described_rows,
                    rows=0 if is_last else len(chunk),
                    trees=trees,
                )
                batch += 1
                if not is_last:
                    nodes_BT = reply["nodes"].cpu().numpy()
                    # A row is listed once for each bit about it. There are no bits about rows in
                    # leaves.
                    described_rows = np.repeat(chunk, (nodes_BT != SETTLED).sum(axis=1))
                    try:
                        bits = flat.answer(level, nodes_BT, codes_NF[chunk], path_BT).reshape(-1)
                    except ValueError as error:
                        raise self._make_error(
                            f"a question that cannot be answered ({error})"
                        ) from None
                    self._log_question(nodes_BT)
        return batch - first.batch

    def _log_question(self, nodes_BT: Nodes) -> None:
        """Logs the positions of rows. Raises PeerError if they differ from the positions before an
        interruption.
        """
        self._questions += 1
        if not self._answered.is_repeated(
            f"{self._phase}/walk-{self._questions}", nodes_BT.tobytes()
        ):
            raise self._make_error(
                "for different splits on the paths of rows than before the interruption. "
                f"{LOST_FOLDER}"
            )

    def _make_error(self, request: str) -> PeerError:
        peer = self._party.recipe.active.name
        return PeerError(
            Code.MALFORMED_MESSAGE, f"{peer} asks {self._party.name} {request}", party=peer
        )

    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Returns the scores [N, K] of the rows; see ``Scorer.score``. No party may be absent."""
        codes_NF, step = self._encode_rows(), first
        forest_map = make_forest_map(self._party, self._depth)
        scores = [np.empty((0, len(self._forest.base)))]
        for chunk in self._chunks(rows):
            codes_BF = codes_NF[chunk] if len(codes_NF) else codes_NF
            scores_BK, step = self._score_chunk(forest_map, step, chunk, codes_BF)
            scores.append(scores_BK)
        return Scored(torch.from_numpy(np.concatenate(scores)), {}, step.batch - first.batch)

    def _score_chunk(
        self, forest_map: ForestMap, step: StepKey, chunk: Rows, codes_BF: Codes
    ) -> tuple[Doubles, StepKey]:
        """Returns the scores [B, K] of a chunk of rows, and the step after it."""
        count, parties, trees = len(chunk), forest_map.passives, forest_map.flat.trees
        descent = Descent(forest_map, codes_BF, count)
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
                nodes = {
                    party: torch.from_numpy(descent.get_nodes(party)[:rows]) for party in parties
                }
                replies = {party: {"nodes": positions} for party, positions in nodes.items()}
                self._answering.reply(step, replies, about=chunk)
            step = StepKey(step.phase, step.round, step.batch + 1)
        return descent.compute_scores(), step


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
