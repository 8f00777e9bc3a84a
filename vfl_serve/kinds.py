"""Scores ids with each kind of model (split networks, trees that ask the owners of splits, models
that one party or the holder of a row uses alone), and chooses the scorer and the answers by the
kind.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.errors import Code, InternalError, PeerError
from vfl_common.rpc.serving.service import ServingService
from vfl_common.rpc.serving.stream import (
    EMBEDDED,
    FAILED,
    UNKNOWN,
    Absent,
    ServingAnswer,
    Step,
    withhold_on_error,
)
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.exchanges import compute_features
from vfl_party.models.halves import Tail
from vfl_party.outbound.chain import Chain, Chains
from vfl_party.outbound.declared import Sent
from vfl_party.outbound.exchange import way_of
from vfl_party.phases.context import Party
from vfl_party.phases.online import AnswerStep, Cells, Online, Reply
from vfl_party.phases.scoring import compute_outputs
from vfl_party.predict.run import Quality
from vfl_serve.answering import (
    PHASE,
    Answers,
    Limit,
    SelectIds,
    SentBefore,
    encode_states,
    find_answered_rows,
    select_all_ids,
)
from vfl_serve.scored import RequestPart, ServedScores, State, Why
from vfl_serve.scorer import (
    WHY,
    OnlineScorer,
    RequestColumns,
    RequestEmbeddings,
    choose_state,
    choose_unscored_state,
    look_up_own_rows,
    make_result_columns,
)
from vfl_serve.store import FeatureLookup, Held
from vfl_serve.stores.kept import KeptEmbeddings
from vfl_serve.stores.seam import LookupResult

# Maximum number of scorings that a passive party keeps open. The active party runs few at a time.
_MAX_OPEN = 32


# Shortest timeout of a question, in seconds.
_MIN_TIMEOUT_S = 0.001


# Reasons why a party takes no part in a row. Arrays have their index, or one of two other codes:
# the party takes part, or the active party has not asked it.
_WHY: tuple[Why, ...] = get_args(Why)


_THERE, _NOT_ASKED = -1, -2


Bools = npt.NDArray[np.bool_]


class PendingStep(Protocol):
    """A pending question to the passive parties; see ``vfl_common.rpc.serving.service.Pending``."""

    number: int

    def wait(self) -> Mapping[str, ServingAnswer | Absent]: ...


class AskStep(Protocol):
    """Asks passive parties; see ``vfl_common.rpc.serving.service.ServingService.ask``."""

    def __call__(
        self, ids: Sequence[str], timeout_s: float, steps: Mapping[str, Step]
    ) -> PendingStep: ...


class _ModelSide:
    """A party's side of the model for the current table. A changed table gets a new object."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.online = get_online(held)
        self.chains: Chains = held.party.exchanges.make_chains(PHASE, self.online.exchange)
        self.has_features = held.party.rows.features is not None


def get_online(held: Held) -> Online:
    """Returns the party's side of the model. Raises InternalError if its method has none."""
    online: Online | None = held.party.course.online(held.party)
    if online is None:
        raise InternalError(f"{held.party.name}: the model does not score in steps")
    return online


class StepScorer:
    """Scores ids at the active party. Several threads may call it at once.

    ``OnlineScorer`` describes the arguments.
    """

    def __init__(
        self, store: FeatureLookup, ask: AskStep, timeout_s: float, quality: Quality
    ) -> None:
        self._store, self._ask, self._timeout_s, self._quality = store, ask, timeout_s, quality
        self._side = _ModelSide(store.held)

    @torch.no_grad()
    def score(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> ServedScores:
        """Scores rows by id, in their order; see ``OnlineScorer.score``.

        A row has no score if it needs a party that is missing. If the active party has features,
        it asks the other parties only about ids that it knows. Raises InputError.
        """
        held, until_s = self._store.held, time.monotonic() + self._timeout_s
        side, why = self._side, np.full(len(ids), _THERE)
        if side.held is not held:
            side = self._side = _ModelSide(held)
        normalized = held.normalize(ids)
        cells: Cells | None = None
        if columns is not None:
            cells = held.cells_given(columns, len(ids))
        elif side.has_features:
            result = look_up_own_rows(held, normalized, until_s)
            if isinstance(result, LookupResult):
                why = _encode_reasons(result.states())
                cells = held.cells(result, result.rows[why == _THERE])
            else:
                why[:] = _WHY.index(result)
        # No party has an empty text as an id.
        known_ids = [normalized[at] or "" for at in np.flatnonzero(why == _THERE)]
        return self._make_scores(
            side, why, cells, _StepAsker(self._ask, until_s, side, known_ids), min_quality
        )

    def _make_scores(
        self,
        side: _ModelSide,
        why: npt.NDArray[np.int64],
        cells: Cells | None,
        asking: _StepAsker,
        min_quality: float | None,
    ) -> ServedScores:
        """Returns the scores of N rows.

        Args:
            why: int64 [N], the active party's state in each row: an index into ``_WHY`` or
                ``_THERE``.
            cells: the active party's cells of the rows in which it takes part.
        """
        party, n, known_rows = side.held.party, len(why), np.flatnonzero(why == _THERE)
        names = [member.name for member in party.recipe.parties]
        outputs = torch.zeros(n, party.recipe.task.outputs, dtype=torch.float64)
        lost_N, why_NK = np.ones(n, bool), np.full((n, len(names)), _NOT_ASKED)
        why_NK[:, names.index(party.name)] = why
        if len(known_rows):
            scored = side.online.score(cells, len(known_rows), asking)
            outputs[torch.from_numpy(known_rows)] = scored.outputs.to(outputs)
            lost_N[known_rows] = np.any(
                [*scored.lost.values(), np.zeros(len(known_rows), bool)], axis=0
            )
            for name in party.exchanges.widths:
                why_NK[known_rows, names.index(name)] = asking.why(name, scored.lost[name])
        failed_N = ~outputs.isfinite().all(dim=1)
        outputs[failed_N] = 0.0
        keys_PK, part_numbers = np.unique(why_NK, axis=0, return_inverse=True)
        part_numbers = part_numbers.reshape(-1)
        parts = [self._make_part(side, names, key.tolist()) for key in keys_PK]
        state: list[State] = [
            self._choose_state(
                parts[part_numbers[at]], side, bool(lost_N[at]), bool(failed_N[at]), min_quality
            )
            for at in range(n)
        ]
        return ServedScores(make_result_columns(side.held, outputs), state, parts, part_numbers)

    def _make_part(self, side: _ModelSide, names: Sequence[str], why: Sequence[int]) -> RequestPart:
        reasons = dict(zip(names, why, strict=True))
        if not side.has_features:
            # An active party that has only labels is neither present nor missing.
            del reasons[side.held.party.name]
        parties = tuple(name for name, reason in reasons.items() if reason == _THERE)
        missing = {name: _WHY[reason] for name, reason in reasons.items() if reason >= 0}
        return RequestPart(parties, missing, self._quality.of(parties))

    def _choose_state(
        self,
        part: RequestPart,
        side: _ModelSide,
        is_lost: bool,
        failed: bool,
        min_quality: float | None,
    ) -> State:
        active = side.held.party.name
        if active in part.missing or not part.parties:
            return choose_unscored_state(part.missing.get(active, "unknown id"))
        if is_lost:
            return "incomplete"
        return "failed" if failed else choose_state(part, self._quality, min_quality)


class _StepAsker:
    """Asks the passive parties, step by step; see ``vfl_party.phases.online.Ask``."""

    def __init__(self, ask: AskStep, until_s: float, side: _ModelSide, ids: Sequence[str]) -> None:
        self._ask, self._until_s, self._side, self._ids = ask, until_s, side, ids
        self._first_step = 0
        # {party: the states of the ids in its first answer}
        self._states: dict[str, bytes] = {}
        # {party: int64 [N], each id's index into ``_WHY``, or ``_THERE``}, and {party: why a later
        # step failed}
        self._first_reasons: dict[str, npt.NDArray[np.int64]] = {}
        self._later_reasons: dict[str, Absent] = {}

    def __call__(self, asked: Mapping[str, bytes], size: int) -> Mapping[str, Reply]:
        steps = {
            name: Step(self._pass_chain(data), self._first_step, size=size)
            for name, data in asked.items()
        }
        left_s = max(_MIN_TIMEOUT_S, self._until_s - time.monotonic())
        pending = self._ask(self._ids, left_s, steps)
        replies = {}
        for name, received in pending.wait().items():
            answer = received
            # A party must not change the states of ids during a scoring.
            if isinstance(received, ServingAnswer):
                same = self._states.setdefault(name, received.state) == received.state
                answer = received if same else "failed"
            if not isinstance(answer, ServingAnswer):
                if self._first_step:
                    self._later_reasons[name] = answer
                else:
                    self._first_reasons[name] = np.full(len(self._ids), _WHY.index(answer))
                continue
            state = np.frombuffer(answer.state, np.uint8)
            if not self._first_step:
                self._first_reasons[name] = _encode_reasons(state)
            replies[name] = Reply(state == EMBEDDED, answer.answered)
        self._first_step = self._first_step or pending.number
        return replies

    def _pass_chain(self, asked: bytes) -> bytes:
        """Returns the bytes to send, after the chain. Raises VflError if the policy refuses."""
        chain, down = self._side.chains.down, self._side.online.exchange.down
        return _apply_chain(chain, down, asked)

    def why(self, name: str, lost_N: Bools) -> npt.NDArray[np.int64]:
        """Returns int64 [N]: why a party takes no part in each id's score, or ``_THERE``.

        ``lost_N``: bool [N], the ids that needed an answer that the party did not give.
        """
        reasons = self._first_reasons[name]
        later = self._later_reasons.get(name)
        if later is None:
            return reasons
        return np.where(lost_N & (reasons == _THERE), _WHY.index(later), reasons)


class StepAnswers:
    """Answers the steps of scorings at a passive party. Any thread may call it."""

    def __init__(
        self, store: FeatureLookup, limit: Limit | None = None, asked: SelectIds = select_all_ids
    ) -> None:
        self._store, self._limit, self._asked = store, limit, asked
        # Creates the chains now, so that a refusing policy is found before the first question.
        self._side = side = _ModelSide(store.held)
        self.way = way_of(side.online.exchange, side.chains, 1, up=True)
        self._open_scorings: OrderedDict[int, _OpenScoring] = OrderedDict()
        self._answering = threading.Lock()

    def __call__(
        self, ids: Sequence[str], until_s: float, step: Step | None = None
    ) -> ServingAnswer:
        """Returns the method's answer to a step about ``ids``, which the first step sends.

        Raises the errors of ``Answers.__call__``.
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
        """Forgets all open scorings."""
        self._open_scorings.clear()

    def _answer(self, step: Step) -> ServingAnswer:
        scoring = self._open_scorings.get(step.first)
        if scoring is None:
            raise self._refusal("asked about a scoring that has not begun here, or is over")
        try:
            answered = scoring.answer(step.asked)
        except ValueError as error:
            raise self._refusal(f"sent a step that cannot be answered ({error})") from None
        up = scoring.side.online.exchange.up
        sent_bytes = _apply_chain(scoring.side.chains.up, up, answered.answered)
        # The first answer reveals for each known id that this party knows it.
        known_N = np.frombuffer(scoring.state, np.uint8) == EMBEDDED
        answered_N = np.flatnonzero(known_N if step.begins else answered.times)
        return ServingAnswer(
            scoring.state,
            features=scoring.version,
            answered=sent_bytes,
            ids=[scoring.ids[index] for index in answered_N.tolist()],
            times=answered.times[answered_N].tolist(),
        )

    def _begin(self, held: Held, result: LookupResult, ids: Sequence[str], step: Step) -> None:
        if self._side.held is not held:
            self._side = _ModelSide(held)
        known_N = find_answered_rows(result, ids, self._limit)
        answer = self._side.online.answering(held.cells(result, result.rows[known_N]), known_N)
        scoring = _OpenScoring(self._side, answer, encode_states(known_N), result.version, ids)
        self._open_scorings[step.first] = scoring
        if len(self._open_scorings) > _MAX_OPEN:
            self._open_scorings.popitem(last=False)

    def _refusal(self, problem: str) -> PeerError:
        peer = self._store.held.party.recipe.active.name
        return PeerError(Code.MALFORMED_MESSAGE, f"{peer}: {problem}", party=peer)


@dataclass(frozen=True)
class _OpenScoring:
    """A scoring whose first step was answered. It keeps the rows of that time.

    ``state``: the states of ``ids`` as bytes. ``version``: the version of the features.
    """

    side: _ModelSide
    answer: AnswerStep
    state: bytes
    version: str
    ids: Sequence[str]


def _encode_reasons(state: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Returns int64 [N]: the index into ``_WHY`` for the state of each id, or ``_THERE``."""
    places = np.full(len(state), _THERE)
    for code, why in WHY.items():
        places[state == code] = _WHY.index(why)
    return places


def _apply_chain(chain: Chain, sent: Sent, data: bytes) -> bytes:
    """Returns ``data`` after a chain. Raises VflError if the policy refuses it."""
    (name,) = sent.tensors
    if not chain.filters:
        return data
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return chain.apply({name: tensor})[name].numpy().tobytes()


# States of ids that the active party cannot score.
_LOST = (UNKNOWN, FAILED)
# Reason for a party that answered, but whose latents the score does not use.
_NOT_NEEDED: Why = "not needed"
# Reasons that do not mean a fault.
_FINE: frozenset[Why] = frozenset((_NOT_NEEDED, "not answered"))


class AloneScorer:
    """Scores ids with the run's student, at the active party alone.

    Several threads may call it at once. ``timeout_s``: timeout for a database or feature service.
    """

    def __init__(self, store: FeatureLookup, timeout_s: float, quality: Quality) -> None:
        self._store, self._timeout_s = store, timeout_s
        # The values for sets of parties do not apply to the student.
        self._quality = replace(quality, values={})

    @torch.no_grad()
    def score(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> ServedScores:
        """Scores rows by id, in their order; see ``OnlineScorer.score``. Raises InputError."""
        held, n = self._store.held, len(ids)
        party = held.party
        outputs = torch.zeros(n, party.recipe.task.outputs)
        state_N = np.full(n, EMBEDDED, np.uint8)
        if columns is not None:
            solo = held.score_given_by_student(columns, n)
        else:
            result = look_up_own_rows(held, held.normalize(ids), time.monotonic() + self._timeout_s)
            if not isinstance(result, LookupResult):
                lost = [RequestPart((), {party.name: result})]
                none_N = np.zeros(n, np.int64)
                return ServedScores(
                    make_result_columns(held, outputs),
                    [choose_unscored_state(result)] * n,
                    lost,
                    none_N,
                )
            state_N = result.states()
            solo = held.score_by_student(result, result.rows[result.rows >= 0])
        if solo is None:
            raise InternalError(f"{party.name}: the run has no student")
        known_N = state_N == EMBEDDED
        outputs[torch.from_numpy(known_N)] = solo.cpu()
        finite_N = outputs.isfinite().all(dim=1).numpy()
        outputs[torch.from_numpy(~finite_N)] = 0.0
        scored_part = RequestPart((party.name,), {}, self._quality.student)
        scored = choose_state(scored_part, self._quality, min_quality)
        state: list[State] = [
            choose_unscored_state(WHY[code]) if code in WHY else scored if finite else "failed"
            for code, finite in zip(state_N.tolist(), finite_N, strict=True)
        ]
        parts = [scored_part, *(RequestPart((), {party.name: WHY[code]}) for code in _LOST)]
        number_N = np.select([state_N == code for code in _LOST], range(1, len(_LOST) + 1), 0)
        return ServedScores(make_result_columns(held, outputs), state, parts, number_N)


class HolderScorer(OnlineScorer):
    """Scores ids if parties hold different rows; see ``OnlineScorer``.

    A passive party embeds an id, and the active party's tail and head score it. If several parties
    answer for an id, the first in the recipe is used, as in ``vfl predict``.
    """

    def _make_part(
        self,
        party: Party,
        names: Sequence[str],
        mask: npt.NDArray[Any],
        rows: Rows,
        why: Mapping[str, npt.NDArray[Any] | Why],
    ) -> RequestPart:
        part = super()._make_part(party, names, mask, rows, why)
        first, unused = part.parties[:1], part.parties[1:]
        missing = {**part.missing, **dict.fromkeys(unused, _NOT_NEEDED)}
        ordered = {name: missing[name] for name in names if name in missing}
        return replace(part, parties=first, missing=ordered, quality=self._quality.of(first))

    def _choose_state(self, party: Party, part: RequestPart, min_quality: float | None) -> State:
        _ = party
        amiss = {name: why for name, why in part.missing.items() if why not in _FINE}
        if not part.parties:
            # A missing party may have the row.
            return "incomplete" if amiss else "unknown"
        return choose_state(replace(part, missing=amiss), self._quality, min_quality)

    def _score_jointly(
        self, held: Held, part: RequestPart, rows: Rows, embedded: RequestEmbeddings
    ) -> Tensor:
        party, tail = held.party, held.party.models.get("tail")
        if not isinstance(tail, Tail):
            raise InternalError(f"{party.name}: the model has no tail")
        (name,) = part.parties
        z = embedded.others[name][rows].to(party.device)
        return compute_outputs(party, compute_features(party, tail, z.reshape(-1, *tail.latent)))


class RowScorer(Protocol):
    """Scores rows by id at the active party. Several threads may call it at once."""

    def score(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> ServedScores: ...


class Answerer(Protocol):
    """Answers the active party's questions at a passive party; see ``Answers``."""

    way: tuple[str, ...]

    def __call__(
        self, ids: Sequence[str], until_s: float, step: Step | None = None
    ) -> ServingAnswer: ...

    def close(self) -> None: ...


def scores_in_steps(store: FeatureLookup) -> bool:
    """Returns whether the model's method scores ids in steps; see ``kinds.stepwise``."""
    return store.held.party.course.lone_phase is not None


def get_row_bytes(store: FeatureLookup) -> int:
    """Returns the maximum number of bytes that a message contains for one row."""
    if scores_in_steps(store):
        return get_online(store.held).bytes_of_row
    return 4 * max(store.held.widths.values(), default=1)


def make_scorer(
    store: FeatureLookup,
    service: ServingService,
    timeout_s: float,
    quality: Quality,
    stand_in: Mapping[str, Tensor],
    *,
    solo: bool,
    kept: KeptEmbeddings,
) -> RowScorer:
    """Makes the active party's scorer for the kind of model; see ``OnlineScorer``.

    ``solo``: whether to score with the run's student, without passive parties. ``kept``: asks for
    embeddings that are not cached. Raises InputError if a policy refuses.
    """
    if solo:
        return AloneScorer(store, timeout_s, quality)
    if scores_in_steps(store):
        return StepScorer(store, service.ask, timeout_s, quality)
    if store.held.party.recipe.own_rows:
        return HolderScorer(store, kept.ask, timeout_s, quality, {})
    return OnlineScorer(store, kept.ask, timeout_s, quality, stand_in)


def describe_questions(store: FeatureLookup) -> tuple[str, ...]:
    """Returns the record's description of an active party's questions; see ``Recorder.leaves``."""
    if not scores_in_steps(store):
        # A question contains ids and no numbers, so no chain applies.
        return "question", "down", "ids", "unchanged"
    exchange = get_online(store.held).exchange
    return way_of(exchange, store.held.party.exchanges.make_chains(PHASE, exchange), 1, up=False)


def make_answers(
    store: FeatureLookup,
    sent: Callable[[], SentBefore],
    limit: Limit | None,
    asked: SelectIds = select_all_ids,
) -> Answerer:
    """Makes a passive party's ``Answers`` for the kind of model.

    Raises InputError if a policy refuses.
    """
    if scores_in_steps(store):
        return StepAnswers(store, limit, asked)
    return Answers(store, sent, limit, asked)
