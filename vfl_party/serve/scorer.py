"""Scores ids at the active party: asks all passive parties at once, and combines what comes in
time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.errors import InternalError
from vfl_common.rpc.serving.answered import EMBEDDED, REFUSED, Answered
from vfl_common.rpc.serving.service import Absent
from vfl_party.models import combine
from vfl_party.models.top.stand_ins import learnt_stand_ins
from vfl_party.outbound.exchange import nonfinite
from vfl_party.phases.absence import filled
from vfl_party.phases.measure import decides
from vfl_party.phases.scoring import outputs_of
from vfl_party.predict.results import result_columns
from vfl_party.serve.quality import Quality
from vfl_party.serve.scored import Part, Scores, State, Why
from vfl_party.serve.store import Held, Store


class Waiting(Protocol):
    """A question that was asked; see ``vfl_common.rpc.serving.service.Pending``."""

    def wait(self) -> Mapping[str, Answered | Absent]: ...


class Asks(Protocol):
    """Asks the passive parties; see ``vfl_common.rpc.serving.service.ServingService.ask``."""

    def __call__(self, ids: Sequence[str], timeout_s: float) -> Waiting: ...


class OnlineScorer:
    """Scores rows by id; any thread may call it, several at once.

    Args:
        ask: asks the passive parties.
        timeout_s: how long an answer is waited for.
        quality: what was measured of the model, by the parties that take part.
    """

    def __init__(self, store: Store, ask: Asks, timeout_s: float, quality: Quality) -> None:
        self._store, self._ask, self._timeout_s = store, ask, timeout_s
        self._quality = quality

    @torch.no_grad()
    def score(self, ids: Sequence[str], least: float | None = None) -> Scores:
        """Scores rows by id, in their order. ``least``: the quality below which a row is refused.

        An id that the active party does not know has no score, if that party has features. A
        passive party that does not know an id, or is not there in time, is
        replaced as the model has learnt it, or as ``late_policy`` says: by zeros, or under ``skip``
        by nothing.
        """
        held = self._store.held
        spelt = held.spelt(ids)
        # An empty text is no id at any party.
        pending = self._ask([each or "" for each in spelt], self._timeout_s)
        party = held.party
        own_N, own_ND = self._own(held, spelt)
        there, why, z = self._arrived(held, len(ids), pending.wait())
        shape = (len(ids), party.recipe.task.outputs)
        outputs = torch.zeros(shape, device=party.device)
        names = [each.name for each in party.recipe.parties]
        present_NK = np.stack(
            [own_N if name == party.name else there[name] for name in names], axis=1
        )
        stand_ins = learnt_stand_ins(party.models)
        has_own = party.features is not None
        parts: list[Part] = []
        number_N, state = np.zeros(len(ids), np.int64), np.empty(len(ids), object)
        for rows, mask in _alike(present_NK, why):
            part = self._part(party.name, names, mask, rows, why, has_own=has_own)
            number_N[rows] = len(parts)
            parts.append(part)
            took = set(part.parties)
            if not took or (has_own and party.name not in took):
                state[rows] = "unknown"
                continue
            if least is not None and (
                part.quality is None or not self._quality.enough(part.quality, least)
            ):
                state[rows] = "refused"
                continue
            at = torch.from_numpy(rows)
            own = [own_ND[at].to(party.device)] if has_own else []
            others = {name: z[name][at].to(party.device) if name in took else None for name in z}
            rule = party.recipe.model.combine
            given = filled(party.course.without, rule, own, others, party.widths, stand_ins)
            found = outputs_of(party, combine(rule, given))
            # Embeddings may be finite, and yet too large for the top model.
            finite = found.isfinite().all(dim=1)
            outputs[at.to(party.device)] = found.where(finite[:, None], 0.0)
            good = "partly" if part.missing else "scored"
            state[rows] = np.where(finite.cpu().numpy(), good, "failed")
        return Scores(columns_of(held, outputs), _states(state), parts, number_N)

    def _own(self, held: Held, ids: Sequence[str | None]) -> tuple[npt.NDArray[np.bool_], Tensor]:
        """Returns which ids the active party knows, [N], and its embeddings [N, D]."""
        rows = held.rows(ids)
        known = rows >= 0
        z_ND = torch.zeros(len(ids), held.party.embedding_size)
        if held.party.features is None:
            return np.zeros(len(ids), bool), z_ND
        if known.any():
            z_ND[torch.from_numpy(known)] = held.embed(rows[known])
        return known, z_ND

    def _arrived(
        self, held: Held, n: int, answers: Mapping[str, Answered | Absent]
    ) -> tuple[
        dict[str, npt.NDArray[np.bool_]], dict[str, npt.NDArray[Any] | Why], dict[str, Tensor]
    ]:
        """Returns for each passive party which ids it has embedded, [N]; why not, for all or for
        each; and its embeddings [N, D].
        """
        there: dict[str, npt.NDArray[np.bool_]] = {}
        why: dict[str, npt.NDArray[Any] | Why] = {}
        z: dict[str, Tensor] = {}
        for name, width in held.party.widths.items():
            answer, z[name] = answers[name], torch.zeros(n, width)
            there[name] = np.zeros(n, bool)
            if not isinstance(answer, Answered):
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
            there[name], why[name] = state == EMBEDDED, state
            z[name][torch.from_numpy(there[name])] = values.view(-1, width)
        return there, why, z

    def _part(
        self,
        active: str,
        names: Sequence[str],
        mask: npt.NDArray[np.bool_],
        rows: npt.NDArray[np.int64],
        why: Mapping[str, npt.NDArray[Any] | Why],
        *,
        has_own: bool,
    ) -> Part:
        parties = tuple(name for name, in_it in zip(names, mask, strict=True) if in_it)
        missing: dict[str, Why] = {}
        for name in names:
            if name in parties or (name == active and not has_own):
                continue
            said = why.get(name, "unknown id")
            if isinstance(said, np.ndarray):
                said = "refused" if said[rows[0]] == REFUSED else "unknown id"
            missing[name] = said
        return Part(parties, missing, self._quality.of(parties))


def columns_of(held: Held, outputs: Tensor) -> dict[str, npt.NDArray[Any]]:
    """Returns the columns of a result for the top model's outputs [N, O]. Raises InternalError if
    the run knows no classes.
    """
    party = held.party
    if party.data.labels is None:
        raise InternalError(f"the trained run of {party.name} knows no classes")
    found = result_columns(party.recipe, party.data.labels, outputs, decides(party))
    return {name: np.asarray(values) for name, values in found.items()}


def _alike(
    present_NK: npt.NDArray[np.bool_], why: Mapping[str, npt.NDArray[Any] | Why]
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Groups rows in which the same parties take part, and the others do not for the same reasons.
    Returns their numbers, and who takes part.
    """
    refused = [each == REFUSED for each in why.values() if isinstance(each, np.ndarray)]
    key_NK = np.column_stack([present_NK, *refused])
    if (key_NK == key_NK[:1]).all():
        return [(np.arange(len(key_NK)), present_NK[0])] if len(key_NK) else []
    keys, group_N = np.unique(key_NK, axis=0, return_inverse=True)
    k = present_NK.shape[1]
    return [
        (np.flatnonzero(group_N.reshape(-1) == at), keys[at, :k].astype(bool))
        for at in range(len(keys))
    ]


def _states(found: npt.NDArray[Any]) -> list[State]:
    states: list[State] = found.tolist()
    return states
