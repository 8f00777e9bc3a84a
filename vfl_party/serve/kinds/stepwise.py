"""Models whose method has its own way to score ids, in steps: see
``vfl_party.phases.online``.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.errors import Code, InternalError, PeerError
from vfl_common.rpc.serving.answered import EMBEDDED, ServingAnswer, Step, withhold_on_error
from vfl_common.rpc.serving.stream import Absent
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Sent
from vfl_party.outbound.exchange import way_of
from vfl_party.phases.online import AnswerStep, Cells, Online, Reply
from vfl_party.predict.quality import Quality
from vfl_party.serve.answering import PHASE, Limit, find_answered_rows, state_bytes
from vfl_party.serve.asked import LooksUp, every_id
from vfl_party.serve.batching import Given
from vfl_party.serve.scored import RequestPart, ServedScores, State, Why
from vfl_party.serve.scorer import WHY, columns_of, own_rows, state_of, unscored_state
from vfl_party.serve.store import FeatureLookup, Held
from vfl_party.serve.stores.seam import LookupResult

# Scorings that a passive party keeps open; the active party has a few at a time.
_MAX_BEGUN = 32
# Shortest timeout of a question, in seconds.
_MIN_TIMEOUT_S = 0.001
# Why a party takes no part, by number; that it does, or that nobody has asked it.
_WHY: tuple[Why, ...] = get_args(Why)
_THERE, _NOT_ASKED = -1, -2

Bools = npt.NDArray[np.bool_]


class PendingStep(Protocol):
    """A question that was asked; see ``vfl_common.rpc.serving.service.Pending``."""

    number: int

    def wait(self) -> Mapping[str, ServingAnswer | Absent]: ...


class AskStep(Protocol):
    """Asks passive parties; see ``vfl_common.rpc.serving.service.ServingService.ask``."""

    def __call__(
        self, ids: Sequence[str], timeout_s: float, steps: Mapping[str, Step]
    ) -> PendingStep: ...


class _Own:
    """A party's side of the model for the current rows; replaced when the table changes."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.online = online_of(held)
        self.chains: Chains = held.party.chains(PHASE, self.online.exchange)
        self.has_features = held.party.features is not None


def online_of(held: Held) -> Online:
    """Returns the party's side of the model. Raises InternalError if its method has none."""
    online = held.party.course.online(held.party)
    if online is None:
        raise InternalError(f"{held.party.name}: the model does not score in steps")
    return online


class StepScorer:
    """Scores ids at the active party; any thread may call it, several at once. Args: as
    ``OnlineScorer``.
    """

    def __init__(
        self, store: FeatureLookup, ask: AskStep, timeout_s: float, quality: Quality
    ) -> None:
        self._store, self._ask, self._timeout_s, self._quality = store, ask, timeout_s, quality
        self._own = _Own(store.held)

    @torch.no_grad()
    def score(
        self, ids: Sequence[str], min_quality: float | None = None, columns: Given | None = None
    ) -> ServedScores:
        """Scores rows by id, in their order; see ``OnlineScorer.score``.

        A row that needs a party which is missing has no score. Of an id that the active party does
        not know, if it has features, nobody else is asked. Raises InputError.
        """
        held, until_s = self._store.held, time.monotonic() + self._timeout_s
        own, why = self._own, np.full(len(ids), _THERE)
        if own.held is not held:
            own = self._own = _Own(held)
        spelt = held.spelt(ids)
        cells: Cells | None = None
        if columns is not None:
            cells = held.cells_given(columns, len(ids))
        elif own.has_features:
            result = own_rows(held, spelt, until_s)
            if isinstance(result, LookupResult):
                why = _places(result.states())
                cells = held.cells(result, result.rows[why == _THERE])
            else:
                why[:] = _WHY.index(result)
        # An empty text is no id at any party.
        asked = [spelt[at] or "" for at in np.flatnonzero(why == _THERE)]
        return self._scores(own, why, cells, _Asking(self._ask, until_s, own, asked), min_quality)

    def _scores(
        self,
        own: _Own,
        why: npt.NDArray[np.int64],
        cells: Cells | None,
        asking: _Asking,
        min_quality: float | None,
    ) -> ServedScores:
        """Returns the scores of rows. ``why``: why the active party takes no part in each,
        ``_THERE`` if it does. ``cells``: its own, of the latter.
        """
        party, n, asked = own.held.party, len(why), np.flatnonzero(why == _THERE)
        names = [member.name for member in party.recipe.parties]
        outputs = torch.zeros(n, party.recipe.task.outputs, dtype=torch.float64)
        lost_N, why_NK = np.ones(n, bool), np.full((n, len(names)), _NOT_ASKED)
        why_NK[:, names.index(party.name)] = why
        if len(asked):
            scored = own.online.score(cells, len(asked), asking)
            outputs[torch.from_numpy(asked)] = scored.outputs.to(outputs)
            lost_N[asked] = np.any([*scored.lost.values(), np.zeros(len(asked), bool)], axis=0)
            for name in party.widths:
                why_NK[asked, names.index(name)] = asking.why(name, scored.lost[name])
        failed_N = ~outputs.isfinite().all(dim=1)
        outputs[failed_N] = 0.0
        keys_PK, of_part = np.unique(why_NK, axis=0, return_inverse=True)
        of_part = of_part.reshape(-1)
        parts = [self._part(own, names, key.tolist()) for key in keys_PK]
        state: list[State] = [
            self._state(parts[of_part[at]], own, bool(lost_N[at]), bool(failed_N[at]), min_quality)
            for at in range(n)
        ]
        return ServedScores(columns_of(own.held, outputs), state, parts, of_part)

    def _part(self, own: _Own, names: Sequence[str], why: Sequence[int]) -> RequestPart:
        reasons = dict(zip(names, why, strict=True))
        if not own.has_features:
            # It has labels only, and is neither there nor missing.
            del reasons[own.held.party.name]
        parties = tuple(name for name, reason in reasons.items() if reason == _THERE)
        missing = {name: _WHY[reason] for name, reason in reasons.items() if reason >= 0}
        return RequestPart(parties, missing, self._quality.of(parties))

    def _state(
        self, part: RequestPart, own: _Own, lost: bool, failed: bool, min_quality: float | None
    ) -> State:
        active = own.held.party.name
        if active in part.missing or not part.parties:
            return unscored_state(part.missing.get(active, "unknown id"))
        if lost:
            return "incomplete"
        return "failed" if failed else state_of(part, self._quality, min_quality)


class _Asking:
    """Asks about the ids of one scoring, step by step; see ``vfl_party.phases.online.Ask``."""

    def __init__(self, ask: AskStep, until_s: float, own: _Own, ids: Sequence[str]) -> None:
        self._ask, self._until_s, self._own, self._ids = ask, until_s, own, ids
        self._first = 0
        # By party: what it has said of the ids first.
        self._states: dict[str, bytes] = {}
        # By party: of each id, its place in ``_WHY``, or ``_THERE``; and why a later step failed.
        self._at_first: dict[str, npt.NDArray[np.int64]] = {}
        self._later: dict[str, Absent] = {}

    def __call__(self, asked: Mapping[str, bytes], size: int) -> Mapping[str, Reply]:
        steps = {
            name: Step(self._leaves(data), self._first, size=size) for name, data in asked.items()
        }
        left_s = max(_MIN_TIMEOUT_S, self._until_s - time.monotonic())
        pending = self._ask(self._ids, left_s, steps)
        replies = {}
        for name, received in pending.wait().items():
            answer = received
            # An id cannot become unknown, or known, in the middle of a scoring.
            if isinstance(received, ServingAnswer):
                same = self._states.setdefault(name, received.state) == received.state
                answer = received if same else "failed"
            if not isinstance(answer, ServingAnswer):
                if self._first:
                    self._later[name] = answer
                else:
                    self._at_first[name] = np.full(len(self._ids), _WHY.index(answer))
                continue
            state = np.frombuffer(answer.state, np.uint8)
            if not self._first:
                self._at_first[name] = _places(state)
            replies[name] = Reply(state == EMBEDDED, answer.answered)
        self._first = self._first or pending.number
        return replies

    def _leaves(self, asked: bytes) -> bytes:
        """Returns what leaves: the chain lets it. Raises VflError if it does not."""
        chain, down = self._own.chains.down, self._own.online.exchange.down
        return _through(chain, down, asked)

    def why(self, name: str, lost_N: Bools) -> npt.NDArray[np.int64]:
        """Returns why a party takes no part in each id, ``_THERE`` if it does. ``lost_N``: which
        ids needed it in vain.
        """
        reasons = self._at_first[name]
        later = self._later.get(name)
        if later is None:
            return reasons
        return np.where(lost_N & (reasons == _THERE), _WHY.index(later), reasons)


class StepAnswers:
    """Answers a passive party's part of such a scoring; any thread may call it."""

    def __init__(
        self, store: FeatureLookup, limit: Limit | None = None, asked: LooksUp = every_id
    ) -> None:
        self._store, self._limit, self._asked = store, limit, asked
        # So that a policy that refuses is found before anybody asks.
        self._own = own = _Own(store.held)
        self.way = way_of(own.online.exchange, own.chains, 1, up=True)
        self._begun: OrderedDict[int, _Begun] = OrderedDict()
        self._answering = threading.Lock()

    def __call__(
        self, ids: Sequence[str], until_s: float, step: Step | None = None
    ) -> ServingAnswer:
        """Returns what the method answers about ids, those of the first step. Raises as
        ``Answers``.
        """
        if step is None:
            raise self._refusal("asked for embeddings, which this model does not have")
        held = self._store.held
        result = held.look_up(self._asked(ids), until_s) if step.begins else None
        with self._answering:
            if result is not None:
                with withhold_on_error:
                    self._begin(held, result, ids, step)
            return self._answer(step)

    def close(self) -> None:
        """Forgets the scorings that were begun."""
        self._begun.clear()

    def _answer(self, step: Step) -> ServingAnswer:
        begun = self._begun.get(step.first)
        if begun is None:
            raise self._refusal("asked about a scoring that has not begun here, or is over")
        try:
            answered = begun.answer(step.asked)
        except ValueError as error:
            raise self._refusal(f"sent a step that cannot be answered ({error})") from None
        up = begun.own.online.exchange.up
        leaves = _through(begun.own.chains.up, up, answered.answered)
        # The first answer tells of each that it is known.
        known = np.frombuffer(begun.state, np.uint8) == EMBEDDED
        answered_N = np.flatnonzero(known if step.begins else answered.times)
        return ServingAnswer(
            begun.state,
            features=begun.version,
            answered=leaves,
            ids=[begun.ids[index] for index in answered_N.tolist()],
            times=answered.times[answered_N].tolist(),
        )

    def _begin(self, held: Held, result: LookupResult, ids: Sequence[str], step: Step) -> None:
        if self._own.held is not held:
            self._own = _Own(held)
        known_N = find_answered_rows(result, ids, self._limit)
        answer = self._own.online.answering(held.cells(result, result.rows[known_N]), known_N)
        begun = _Begun(self._own, answer, state_bytes(known_N), result.version, ids)
        self._begun[step.first] = begun
        if len(self._begun) > _MAX_BEGUN:
            self._begun.popitem(last=False)

    def _refusal(self, problem: str) -> PeerError:
        peer = self._store.held.party.recipe.active.name
        return PeerError(Code.MALFORMED_MESSAGE, f"{peer}: {problem}", party=peer)


@dataclass(frozen=True)
class _Begun:
    """A scoring that was begun, with the rows as they were then. ``state``: of its ``ids``;
    ``version``: of the features.
    """

    own: _Own
    answer: AnswerStep
    state: bytes
    version: str
    ids: Sequence[str]


def _places(state: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Returns of each id the place in ``_WHY`` of why a party takes no part, by its state there;
    ``_THERE`` if it does.
    """
    places = np.full(len(state), _THERE)
    for code, why in WHY.items():
        places[state == code] = _WHY.index(why)
    return places


def _through(chain: Chain, sent: Sent, data: bytes) -> bytes:
    """Returns bytes as they leave through a chain. Raises VflError if they may not."""
    (name,) = sent.tensors
    if not chain.filters:
        return data
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return chain.apply({name: tensor})[name].numpy().tobytes()
