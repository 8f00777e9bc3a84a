"""Scores ids at the active party: asks all passive parties at once, and combines what comes in
time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.bundle import HUGE
from vfl_common.errors import InternalError, VflError
from vfl_common.rpc.serving.answered import (
    EMBEDDED,
    FAILED,
    LATE,
    NOT_ANSWERED,
    UNKNOWN,
    ServingAnswer,
)
from vfl_common.rpc.serving.stream import Absent
from vfl_party.base.seeds import Rows
from vfl_party.models import combine
from vfl_party.models.top.stand_ins import learnt_stand_ins
from vfl_party.outbound.exchange import nonfinite
from vfl_party.phases.absence import fill_missing
from vfl_party.phases.context import Party
from vfl_party.phases.measure import decides
from vfl_party.phases.scoring import SOLO, outputs_of
from vfl_party.predict.quality import Quality
from vfl_party.predict.results import result_columns
from vfl_party.serve.batching import Given
from vfl_party.serve.scored import RequestPart, ServedScores, State, Why
from vfl_party.serve.store import FeatureLookup, Held
from vfl_party.serve.stores.seam import LookupResult
from vfl_party.serve.telling import OWN, PARTIES, TOP, stage

# Why a party took no part in a row, by its state there. Only the active party says of itself that
# it does not know an id.
WHY: Mapping[int, Why] = {
    NOT_ANSWERED: "not answered",
    UNKNOWN: "unknown id",
    LATE: "late",
    FAILED: "failed",
}

log = logging.getLogger(__name__)


class PendingQuestion(Protocol):
    """A question that was asked; see ``vfl_common.rpc.serving.service.Pending``."""

    def wait(self) -> Mapping[str, ServingAnswer | Absent]: ...


class AskQuestion(Protocol):
    """Asks the passive parties; see ``vfl_common.rpc.serving.service.ServingService.ask``."""

    def __call__(self, ids: Sequence[str], timeout_s: float) -> PendingQuestion: ...


# Returns the student's outputs for rows of a request, [N, O]; None without a student.
Solo = Callable[[Rows], Tensor | None]


class OnlineScorer:
    """Scores rows by id; any thread may call it, several at once.

    Args:
        ask: asks the passive parties.
        timeout_s: how long an answer is waited for.
        quality: what was measured of the model, by the parties that take part.
        stand_in: {party: what stood in for its embeddings then, [1, D]}; empty if nothing was
            measured.
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
        self, ids: Sequence[str], min_quality: float | None = None, columns: Given | None = None
    ) -> ServedScores:
        """Scores rows by id, in their order.

        Args:
            min_quality: refuses rows below this quality.
            columns: the active party's columns of these rows, in place of those of its table.

        An id that the active party does not know has no score, if that party has features. A
        passive party that does not know an id, or is not there in time, is replaced as the model
        has learnt it; else as in the measurement of sets of parties; without one, as
        ``late_policy`` says: by zeros, or under ``skip`` by nothing. If no passive party takes
        part, the run's student scores the row, if there is one and the model has not learnt to do
        without them. In all these cases a row has a score only if the quality of these parties, or
        of the student, was measured.
        """
        held, until_s = self._store.held, time.monotonic() + self._timeout_s
        party = held.party
        spelt = held.spelt(ids)
        # An empty text is no id at any party.
        pending = self._ask([name or "" for name in spelt], self._timeout_s)
        with stage(OWN):
            own_N, own_why, own_ND, solo = self._own(held, spelt, columns, until_s)
        with stage(PARTIES):
            answers = pending.wait()
        there, why, z = self._collect(held, len(ids), answers)
        if party.features is not None:
            why[party.name] = own_why
        embedded = Embedded(own_ND if party.features is not None else None, z)
        outputs = torch.zeros(len(ids), party.recipe.task.outputs, device=party.device)
        names = [member.name for member in party.recipe.parties]
        present_NK = np.stack(
            [own_N if name == party.name else there[name] for name in names], axis=1
        )
        parts: list[RequestPart] = []
        number_N, state = np.zeros(len(ids), np.int64), np.empty(len(ids), object)
        for rows, mask in _alike(present_NK, why):
            part = self._part(party, names, mask, rows, why)
            number_N[rows] = len(parts)
            state[rows] = self._state(party, part, min_quality)
            # Without a score there is no quality to expect of it.
            scored = state[rows[0]] not in ("unknown", "failed", "incomplete")
            parts.append(part if scored else replace(part, quality=None))
            if state[rows[0]] in ("scored", "partly"):
                with stage(TOP):
                    outputs_BO = solo(rows) if _by_student(party, part) else None
                    if outputs_BO is None:
                        outputs_BO = self._joint(held, part, rows, embedded)
                # Embeddings may be finite, and yet too large for the top model.
                finite = outputs_BO.isfinite().all(dim=1)
                state[rows[~finite.cpu().numpy()]] = "failed"
                outputs[torch.from_numpy(rows).to(party.device)] = outputs_BO.where(
                    finite[:, None], 0.0
                )
        return ServedScores(columns_of(held, outputs), state.tolist(), parts, number_N)

    def _state(self, party: Party, part: RequestPart, min_quality: float | None) -> State:
        if not part.parties or (party.features is not None and party.name not in part.parties):
            return unscored_state(part.missing.get(party.name, "unknown id"))
        state = state_of(part, self._quality, min_quality)
        # A score that looks like any other, and may be far from the model's, harms in silence.
        return "unmeasured" if state == "partly" and part.quality is None else state

    def _joint(self, held: Held, part: RequestPart, rows: Rows, embedded: Embedded) -> Tensor:
        """Returns the joint model's outputs for rows of a request, [B, O]."""
        party, at = held.party, torch.from_numpy(rows)
        own = [embedded.own[at].to(party.device)] if embedded.own is not None else []
        others = {
            name: z_ND[at].to(party.device)
            if name in part.parties
            else self._absent(held, name, rows)
            for name, z_ND in embedded.others.items()
        }
        rule, stand_ins = party.recipe.model.combine, learnt_stand_ins(party.models)
        embeddings = fill_missing(party.course.without, rule, own, others, party.widths, stand_ins)
        return outputs_of(party, combine(rule, embeddings))

    def _absent(self, held: Held, name: str, rows: Rows) -> Tensor | None:
        """Returns what stands in for a passive party, [B, D]; None if the model knows that."""
        mean = self._stand_in.get(name)
        if mean is None or held.party.course.copes:
            return None
        return mean.expand(len(rows), -1).to(held.party.device)

    def _own(
        self, held: Held, ids: Sequence[str | None], columns: Given | None, until_s: float
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[Any] | Why, Tensor, Solo]:
        """Returns which ids the active party knows, [N], why not, for all or for each, its
        embeddings [N, D], and what gives its student's outputs. Raises InputError for columns that
        are not those of training.
        """
        if columns is not None:
            n, values = len(ids), columns

            def solo_given(at: Rows) -> Tensor | None:
                solo = held.solo_given(values, n)
                return None if solo is None else solo[torch.from_numpy(at)]

            return np.ones(n, bool), "failed", held.embed_given(columns, n), solo_given
        z_ND, nobody = torch.zeros(len(ids), held.party.embedding_size), np.zeros(len(ids), bool)
        if held.party.features is None:
            return nobody, "unknown id", z_ND, lambda _rows: None
        result = own_rows(held, ids, until_s)
        if not isinstance(result, LookupResult):
            return nobody, result, z_ND, lambda _rows: None
        known = result.rows >= 0
        if known.any():
            z_ND[torch.from_numpy(known)] = held.embed(result, result.rows[known])
        return known, result.states(), z_ND, lambda at: held.solo(result, result.rows[at])

    def _collect(
        self, held: Held, n: int, answers: Mapping[str, ServingAnswer | Absent]
    ) -> tuple[
        dict[str, npt.NDArray[np.bool_]], dict[str, npt.NDArray[Any] | Why], dict[str, Tensor]
    ]:
        """Returns for each passive party which ids it has embedded, [N]; why not, for all or for
        each; and its embeddings [N, D].
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
            # A larger number saturates the top model, and the score says nothing of the row.
            usable = (z_MD.abs() <= HUGE).all(dim=1)
            state = state.copy()
            state[embedded[~usable.numpy()]] = FAILED
            there[name], why[name] = state == EMBEDDED, state
            z[name][torch.from_numpy(there[name])] = z_MD[usable]
        return there, why, z

    def _part(
        self,
        party: Party,
        names: Sequence[str],
        mask: npt.NDArray[np.bool_],
        rows: Rows,
        why: Mapping[str, npt.NDArray[Any] | Why],
    ) -> RequestPart:
        parties = tuple(name for name, in_it in zip(names, mask, strict=True) if in_it)
        missing: dict[str, Why] = {}
        for name in names:
            if name in parties or (name == party.name and party.features is None):
                continue
            reason = why.get(name, "unknown id")
            if isinstance(reason, np.ndarray):
                reason = WHY[int(reason[rows[0]])]
            missing[name] = reason
        part = RequestPart(parties, missing)
        student = _by_student(party, part)
        quality = self._quality.student if student else self._quality.of(parties)
        return replace(part, quality=quality)


@dataclass(frozen=True)
class Embedded:
    """The embeddings of a request's rows. ``own``: the active party's, [N, D]; None without
    features. ``others``: {passive party: its own, [N, D]}, zeros for rows that it has not embedded.
    """

    own: Tensor | None
    others: Mapping[str, Tensor]


def own_rows(held: Held, ids: Sequence[str | None], until_s: float) -> LookupResult | Why:
    """Returns what the active party itself knows of ids, or why it cannot say; see
    ``Held.look_up``.
    """
    try:
        return held.look_up(ids, until_s)
    except TimeoutError:
        return "late"
    except VflError as error:
        log.warning("%s", error, extra={"event": "unanswered"})
        return "failed"


def unscored_state(why: Why) -> State:
    """Returns the state of a row in which the active party itself takes no part."""
    return "unknown" if why == "unknown id" else "failed"


def state_of(part: RequestPart, quality: Quality, min_quality: float | None) -> State:
    """Returns the state of a row that these parties score. ``min_quality``: see
    ``OnlineScorer.score``.
    """
    if min_quality is not None and (
        part.quality is None or not quality.enough(part.quality, min_quality)
    ):
        return "refused"
    return "partly" if part.missing else "scored"


def _by_student(party: Party, part: RequestPart) -> bool:
    """Whether the run's student scores rows of these parties."""
    alone = part.parties == (party.name,) and bool(part.missing)
    return alone and SOLO in party.models and not party.course.learns


def columns_of(held: Held, outputs: Tensor) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of a result for the top model's outputs [N, O]. Raises InternalError if
    the run knows no classes.
    """
    party = held.party
    if party.data.labels is None:
        raise InternalError(f"{party.name}: the trained run has no classes")
    result = result_columns(party.recipe, party.data.labels, outputs, decides(party))
    return {name: np.asarray(values) for name, values in result.items()}


def _alike(
    present_NK: npt.NDArray[np.bool_], why: Mapping[str, npt.NDArray[Any] | Why]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Groups rows in which the same parties take part, and the others do not for the same reasons.
    Returns their numbers, and who takes part.
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
