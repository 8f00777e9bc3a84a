"""Scores ids at the active party: asks all passive parties at once and combines the answers that
arrive in time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.bundle import HUGE
from vfl_common.errors import InternalError, VflError
from vfl_common.rpc.serving.stream import (
    EMBEDDED,
    FAILED,
    LATE,
    NOT_ANSWERED,
    UNKNOWN,
    Absent,
    ServingAnswer,
)
from vfl_party.base.seeds import Rows
from vfl_party.models import combine
from vfl_party.models.top import learnt_stand_ins
from vfl_party.outbound.exchange import nonfinite
from vfl_party.phases.absence import fill_missing
from vfl_party.phases.context import Party
from vfl_party.phases.measure import get_threshold
from vfl_party.phases.scoring import SOLO, compute_outputs
from vfl_party.predict.results import result_columns
from vfl_party.predict.run import Quality
from vfl_serve.scored import RequestPart, ServedScores, State, Why
from vfl_serve.store import FeatureLookup, Held
from vfl_serve.stores.seam import LookupResult
from vfl_serve.telling import (
    OWN,
    PARTIES,
    TOP,
    RequestTrace,
    get_current_request,
    record_stage,
    record_stages,
)

# Maximum number of current batches: while some wait for the passive parties, the next is gathered.
# Parties on a fast network rarely need more than a few. Beyond these, a batch waits _PACE_S for
# more requests, so that they share its question.
_MAX_BATCHES, _A_FEW = 12, 4


_PACE_S = 0.004


# Maximum number of waiting requests; further ones are refused.
MAX_WAITING = 2_000


# The columns in a request: {name: values}.
RequestColumns = Mapping[str, Sequence[Any]]


Score = Callable[[Sequence[str], float | None, RequestColumns | None], ServedScores]


class Busy(Exception):  # noqa: N818 - a state of the program, not a fault
    """Too many requests are waiting."""


class BatcherClosed(Busy):
    """The run is closed and accepts no more requests."""


@dataclass
class _WaitingRequest:
    ids: Sequence[str]
    min_quality: float | None
    columns: RequestColumns | None
    answer: Future[ServedScores] = field(default_factory=Future)
    trace: RequestTrace | None = field(default_factory=get_current_request)
    since_ns: int = field(default_factory=time.time_ns)


class Batcher:
    """Scores requests in batches of those that wait at the same time.

    Args:
        score: Scores ids, with the minimum quality and the columns of the request, or None.
        max_rows: The maximum number of rows of a batch.
        wait_s: How long a request waits for others to join its batch.
    """

    def __init__(self, score: Score, max_rows: int, wait_s: float) -> None:
        self._score, self._max_rows, self._wait_s = score, max_rows, wait_s
        self._queue: queue.Queue[_WaitingRequest | None] = queue.Queue(MAX_WAITING)
        self._gathering, self._counting = threading.Lock(), threading.Lock()
        self._closing = threading.Lock()
        self._current_batches, self._closed = 0, False
        self._next: _WaitingRequest | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"score-{number}", daemon=True)
            for number in range(_MAX_BATCHES)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Returns the number of waiting requests."""
        return self._queue.qsize()

    def submit(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> Future[ServedScores]:
        """Queues a request. A request with columns is a batch by itself.

        Raises Busy if too many requests wait, and BatcherClosed after ``close``.
        """
        request = _WaitingRequest(ids, min_quality, columns)
        try:
            # A request that is queued after ``close`` would wait forever.
            with self._closing:
                if self._closed:
                    raise BatcherClosed
                self._queue.put_nowait(request)
        except queue.Full:
            raise Busy from None
        return request.answer

    def close(self) -> None:
        """Scores the waiting requests, then ends the threads."""
        with self._closing:
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._gathering:
                batch = self._gather_batch()
            if not batch:
                return
            self._count_batches(1)
            self._answer(batch)
            self._count_batches(-1)

    def _count_batches(self, more: int) -> None:
        with self._counting:
            self._current_batches += more

    def _gather_batch(self) -> list[_WaitingRequest]:
        """Returns the next batch; an empty list after ``close``."""
        first_request, self._next = self._next, None
        if first_request is None:
            first_request = self._queue.get()
        if first_request is None:
            return []
        batch, rows = [first_request], len(first_request.ids)
        pace_s = _PACE_S if self._current_batches >= _A_FEW else 0.0
        until_s = time.monotonic() + max(self._wait_s, pace_s)
        while rows < self._max_rows and first_request.columns is None:
            remaining_s = until_s - time.monotonic()
            try:
                next_request = (
                    self._queue.get(timeout=remaining_s)
                    if remaining_s > 0
                    else self._queue.get_nowait()
                )
            except queue.Empty:
                break
            if next_request is None:
                # Each None ends one thread, so put it back for another thread.
                self._queue.put(None)
                break
            # The request has other settings, or the batch would be too large.
            differs = (
                next_request.columns is not None
                or next_request.min_quality != first_request.min_quality
            )
            if differs or rows + len(next_request.ids) > self._max_rows:
                self._next = next_request
                break
            batch.append(next_request)
            rows += len(next_request.ids)
        return batch

    def _answer(self, batch: Sequence[_WaitingRequest]) -> None:
        # Callers that are gone have cancelled their requests.
        batch = [request for request in batch if request.answer.set_running_or_notify_cancel()]
        ids = [name for request in batch for name in request.ids]
        if not ids:
            return
        try:
            with record_stages([(request.trace, request.since_ns) for request in batch]):
                scores = self._score(ids, batch[0].min_quality, batch[0].columns)
        except Exception as error:  # noqa: BLE001 - the callers get the error
            for request in batch:
                request.answer.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + len(request.ids)
            request.answer.set_result(scores.slice_rows(slice(start, end)))
            start = end


# {state of an id at a party: why the party took no part}. Only the active party reports for itself
# that it does not know an id.
WHY: Mapping[int, Why] = {
    NOT_ANSWERED: "not answered",
    UNKNOWN: "unknown id",
    LATE: "late",
    FAILED: "failed",
}

log = logging.getLogger(__name__)


class PendingQuestion(Protocol):
    """A pending question to the passive parties; see ``vfl_common.rpc.serving.service.Pending``."""

    def wait(self) -> Mapping[str, ServingAnswer | Absent]: ...


class AskQuestion(Protocol):
    """Asks the passive parties; see ``vfl_common.rpc.serving.service.ServingService.ask``."""

    def __call__(self, ids: Sequence[str], timeout_s: float) -> PendingQuestion: ...


# A function from row numbers of a request to the student's outputs, [N, O]; None without a student.
Solo = Callable[[Rows], Tensor | None]


class OnlineScorer:
    """Scores rows by id. Several threads may call it at once.

    Args:
        ask: Asks the passive parties.
        timeout_s: The timeout for answers.
        quality: The measured quality of the model for each set of parties.
        stand_in: {party: the embedding that replaced its own in that measurement, [1, D]}; empty
            without a measurement.
    """

    def __init__(
        self,
        store: FeatureLookup,
        ask: AskQuestion,
        timeout_s: float,
        quality: Quality,
        stand_in: Mapping[str, Tensor],
    ) -> None:
        self._store, self._ask, self._timeout_s = store, ask, timeout_s
        self._quality, self._stand_in = quality, stand_in

    @torch.no_grad()
    def score(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> ServedScores:
        """Scores rows by id, in their order.

        Args:
            min_quality: Rows below this quality are refused.
            columns: The active party's columns of these rows, in place of its table's.

        If the active party has features, ids that it does not know have no score. A passive party
        that does not know an id, or answers late, is replaced as the model has learnt it. Otherwise
        the replacement of the measurement of sets of parties is used. Without a measurement,
        ``late_policy`` applies: zeros, or nothing under ``skip``. If no passive party takes part,
        the run's student scores the row, unless the model has learnt to score without them. A row
        with a missing party has a score only if the quality of its parties, or of the student, was
        measured.
        """
        held, until_s = self._store.held, time.monotonic() + self._timeout_s
        party = held.party
        normalized = held.normalize(ids)
        # No party has an empty text as an id.
        pending = self._ask([name or "" for name in normalized], self._timeout_s)
        with record_stage(OWN):
            own_N, own_why, own_ND, solo = self._embed_own(held, normalized, columns, until_s)
        with record_stage(PARTIES):
            answers = pending.wait()
        embedded_N, why, z = self._collect(held, len(ids), answers)
        if party.rows.features is not None:
            why[party.name] = own_why
        embedded = RequestEmbeddings(own_ND if party.rows.features is not None else None, z)
        outputs = torch.zeros(len(ids), party.recipe.task.outputs, device=party.device)
        names = [member.name for member in party.recipe.parties]
        present_NK = np.stack(
            [own_N if name == party.name else embedded_N[name] for name in names], axis=1
        )
        parts: list[RequestPart] = []
        number_N, state = np.zeros(len(ids), np.int64), np.empty(len(ids), object)
        for rows, mask in _group_rows(present_NK, why):
            part = self._make_part(party, names, mask, rows, why)
            number_N[rows] = len(parts)
            state[rows] = self._choose_state(party, part, min_quality)
            # A row without a score has no expected quality.
            scored = state[rows[0]] not in ("unknown", "failed", "incomplete")
            parts.append(part if scored else replace(part, quality=None))
            if state[rows[0]] in ("scored", "partly"):
                with record_stage(TOP):
                    outputs_BO = solo(rows) if _is_scored_by_student(party, part) else None
                    if outputs_BO is None:
                        outputs_BO = self._score_jointly(held, part, rows, embedded)
                # Finite embeddings may be too large for the top model.
                finite = outputs_BO.isfinite().all(dim=1)
                state[rows[~finite.cpu().numpy()]] = "failed"
                outputs[torch.from_numpy(rows).to(party.device)] = outputs_BO.where(
                    finite[:, None], 0.0
                )
        return ServedScores(make_result_columns(held, outputs), state.tolist(), parts, number_N)

    def _choose_state(self, party: Party, part: RequestPart, min_quality: float | None) -> State:
        if not part.parties or (party.rows.features is not None and party.name not in part.parties):
            return choose_unscored_state(part.missing.get(party.name, "unknown id"))
        state = choose_state(part, self._quality, min_quality)
        # Such a score looks valid and may be far off, so the row reports no score.
        return "unmeasured" if state == "partly" and part.quality is None else state

    def _score_jointly(
        self, held: Held, part: RequestPart, rows: Rows, embedded: RequestEmbeddings
    ) -> Tensor:
        """Returns the joint model's outputs for ``rows`` of a request, [B, O]."""
        party, index = held.party, torch.from_numpy(rows)
        own_embeddings = [embedded.own[index].to(party.device)] if embedded.own is not None else []
        other_embeddings = {
            name: z_ND[index].to(party.device)
            if name in part.parties
            else self._get_stand_in(held, name, rows)
            for name, z_ND in embedded.others.items()
        }
        rule, stand_ins = party.recipe.model.combine, learnt_stand_ins(party.models)
        widths = party.exchanges.widths
        embeddings = fill_missing(
            party.course.without, rule, own_embeddings, other_embeddings, widths, stand_ins
        )
        return compute_outputs(party, combine(rule, embeddings))

    def _get_stand_in(self, held: Held, name: str, rows: Rows) -> Tensor | None:
        """Returns the measured replacement for a passive party's embeddings, [B, D].

        None if nothing was measured, or if the model has learnt to score without the party.
        """
        mean = self._stand_in.get(name)
        if mean is None or held.party.course.copes:
            return None
        return mean.expand(len(rows), -1).to(held.party.device)

    def _embed_own(
        self, held: Held, ids: Sequence[str | None], columns: RequestColumns | None, until_s: float
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any] | Why, Tensor, Solo]:
        """Returns the active party's part of a request of N ids.

        It is a tuple: bool [N], the known ids; why ids are unknown, for all ids or each; the
        embeddings, float32 [N, D]; and a function that returns the student's outputs. Raises
        InputError if ``columns`` differ from those of training.
        """
        if columns is not None:
            n, values = len(ids), columns

            def solo_given(at: Rows) -> Tensor | None:
                solo = held.score_given_by_student(values, n)
                return None if solo is None else solo[torch.from_numpy(at)]

            return np.ones(n, bool), "failed", held.embed_given(columns, n), solo_given
        z_ND, none_N = torch.zeros(len(ids), held.party.exchanges.width), np.zeros(len(ids), bool)
        if held.party.rows.features is None:
            return none_N, "unknown id", z_ND, lambda _rows: None
        result = look_up_own_rows(held, ids, until_s)
        if not isinstance(result, LookupResult):
            return none_N, result, z_ND, lambda _rows: None
        known_N = result.rows >= 0
        if known_N.any():
            z_ND[torch.from_numpy(known_N)] = held.embed(result, result.rows[known_N])
        return (
            known_N,
            result.states(),
            z_ND,
            lambda at: held.score_by_student(result, result.rows[at]),
        )

    def _collect(
        self, held: Held, n: int, answers: Mapping[str, ServingAnswer | Absent]
    ) -> tuple[
        dict[str, npt.NDArray[np.bool_]], dict[str, npt.NDArray[Any] | Why], dict[str, Tensor]
    ]:
        """Returns three dictionaries by passive party.

        They are: bool [N], the ids that it has embedded; why it has not embedded ids, for all ids
        or each; and its embeddings, float32 [N, D].
        """
        there: dict[str, npt.NDArray[np.bool_]] = {}
        why: dict[str, npt.NDArray[Any] | Why] = {}
        z: dict[str, Tensor] = {}
        for name, width in held.widths.items():
            answer, z[name] = answers[name], torch.zeros(n, width)
            there[name] = np.zeros(n, bool)
            if not isinstance(answer, ServingAnswer):
                why[name] = answer
                continue
            state = np.frombuffer(answer.state, np.uint8)
            values = (
                torch.frombuffer(bytearray(answer.embeddings), dtype=torch.float32)
                if answer.embeddings
                else torch.empty(0)
            )
            if nonfinite(values):
                why[name] = "failed"
                continue
            z_MD, embedded = values.view(-1, width), np.flatnonzero(state == EMBEDDED)
            # Larger numbers saturate the top model, so the score would not depend on the row.
            usable = (z_MD.abs() <= HUGE).all(dim=1)
            state = state.copy()
            state[embedded[~usable.numpy()]] = FAILED
            there[name], why[name] = state == EMBEDDED, state
            z[name][torch.from_numpy(there[name])] = z_MD[usable]
        return there, why, z

    def _make_part(
        self,
        party: Party,
        names: Sequence[str],
        mask: npt.NDArray[np.bool_],
        rows: Rows,
        why: Mapping[str, npt.NDArray[Any] | Why],
    ) -> RequestPart:
        parties = tuple(name for name, is_present in zip(names, mask, strict=True) if is_present)
        missing: dict[str, Why] = {}
        for name in names:
            if name in parties or (name == party.name and party.rows.features is None):
                continue
            reason = why.get(name, "unknown id")
            if isinstance(reason, np.ndarray):
                reason = WHY[int(reason[rows[0]])]
            missing[name] = reason
        part = RequestPart(parties, missing)
        student = _is_scored_by_student(party, part)
        quality = self._quality.student if student else self._quality.of(parties)
        return replace(part, quality=quality)


@dataclass(frozen=True)
class RequestEmbeddings:
    """The embeddings of a request's rows.

    ``own``: the active party's embeddings, [N, D]; None if it has no features. ``others``: {passive
    party: its embeddings, [N, D]}, with zeros for rows that the party has not embedded.
    """

    own: Tensor | None
    others: Mapping[str, Tensor]


def look_up_own_rows(held: Held, ids: Sequence[str | None], until_s: float) -> LookupResult | Why:
    """Looks up ids at the active party itself; see ``Held.look_up``.

    Returns the reason instead if the lookup fails or is late.
    """
    try:
        return held.look_up(ids, until_s)
    except TimeoutError:
        return "late"
    except VflError as error:
        log.warning("%s", error, extra={"event": "unanswered"})
        return "failed"


def choose_unscored_state(why: Why) -> State:
    """Returns the state of a row in which the active party takes no part."""
    return "unknown" if why == "unknown id" else "failed"


def choose_state(part: RequestPart, quality: Quality, min_quality: float | None) -> State:
    """Returns the state of a row that the parties of ``part`` score.

    ``OnlineScorer.score`` describes ``min_quality``.
    """
    if min_quality is not None and (
        part.quality is None or not quality.enough(part.quality, min_quality)
    ):
        return "refused"
    return "partly" if part.missing else "scored"


def _is_scored_by_student(party: Party, part: RequestPart) -> bool:
    """Returns whether the run's student scores rows of ``part``."""
    alone = part.parties == (party.name,) and bool(part.missing)
    return alone and SOLO in party.models and not party.course.learns


def make_result_columns(held: Held, outputs: Tensor) -> dict[str, npt.NDArray[Any]]:
    """Returns {result column: values [N]} for the top model's outputs [N, O].

    Raises InternalError if the run has no labels.
    """
    party = held.party
    if party.rows.data.labels is None:
        raise InternalError(f"{party.name}: the trained run has no classes")
    result = result_columns(party.recipe, party.rows.data.labels, outputs, get_threshold(party))
    return {name: np.asarray(values) for name, values in result.items()}


def _group_rows(
    present_NK: npt.NDArray[np.bool_], why: Mapping[str, npt.NDArray[Any] | Why]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Groups rows with the same parties and the same reasons of missing parties.

    Returns the row numbers of each group, and bool [K], the parties that take part.
    """
    states = [codes for codes in why.values() if isinstance(codes, np.ndarray)]
    key_NK = np.column_stack([present_NK, *states])
    if (key_NK == key_NK[:1]).all():
        return [(np.arange(len(key_NK)), present_NK[0])] if len(key_NK) else []
    keys, group_N = np.unique(key_NK, axis=0, return_inverse=True)
    k = present_NK.shape[1]
    return [
        (np.flatnonzero(group_N.reshape(-1) == at), keys[at, :k].astype(bool))
        for at in range(len(keys))
    ]
