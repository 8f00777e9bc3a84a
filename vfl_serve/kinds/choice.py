"""Chooses the scorer and the answers by the kind of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.errors import InternalError
from vfl_common.rpc.serving.service import ServingService
from vfl_common.rpc.serving.stream import EMBEDDED, FAILED, UNKNOWN, ServingAnswer, Step
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.exchanges import compute_features
from vfl_party.models.halves import Tail
from vfl_party.outbound.exchange import way_of
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import compute_outputs
from vfl_party.predict.run import Quality
from vfl_serve.answering import PHASE, Answers, Limit, SentBefore
from vfl_serve.asked import SelectIds, select_all_ids
from vfl_serve.batching import RequestColumns
from vfl_serve.kinds.stepwise import StepAnswers, StepScorer, get_online
from vfl_serve.scored import RequestPart, ServedScores, State, Why
from vfl_serve.scorer import (
    WHY,
    OnlineScorer,
    RequestEmbeddings,
    choose_state,
    choose_unscored_state,
    look_up_own_rows,
    make_result_columns,
)
from vfl_serve.store import FeatureLookup, Held
from vfl_serve.stores.kept import KeptEmbeddings
from vfl_serve.stores.seam import LookupResult

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
    return way_of(exchange, store.held.party.chains(PHASE, exchange), 1, up=False)


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
