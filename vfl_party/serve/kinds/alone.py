"""Models with which the active party scores by itself: the run's student. Nobody is asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vfl_common.errors import InternalError
from vfl_common.rpc.serving.answered import EMBEDDED, FAILED, UNKNOWN
from vfl_party.predict.quality import Quality
from vfl_party.serve.batching import Given
from vfl_party.serve.scored import RequestPart, ServedScores, State
from vfl_party.serve.scorer import WHY, columns_of, own_rows, state_of, unscored_state
from vfl_party.serve.store import FeatureLookup
from vfl_party.serve.stores.seam import LookupResult

# States of ids without a score.
_LOST = (UNKNOWN, FAILED)


class AloneScorer:
    """Scores ids with the run's student; any thread may call it, several at once.

    ``timeout_s``: how long a store that is asked by id is waited for.
    """

    def __init__(self, store: FeatureLookup, timeout_s: float, quality: Quality) -> None:
        self._store, self._timeout_s = store, timeout_s
        # What was measured of the student; that of sets of parties says nothing of it.
        self._quality = replace(quality, values={})

    @torch.no_grad()
    def score(
        self, ids: Sequence[str], min_quality: float | None = None, columns: Given | None = None
    ) -> ServedScores:
        """Scores rows by id, in their order; see ``OnlineScorer.score``. Raises InputError."""
        held, n = self._store.held, len(ids)
        party = held.party
        outputs = torch.zeros(n, party.recipe.task.outputs)
        state_N = np.full(n, EMBEDDED, np.uint8)
        if columns is not None:
            solo = held.solo_given(columns, n)
        else:
            own = own_rows(held, held.spelt(ids), time.monotonic() + self._timeout_s)
            if not isinstance(own, LookupResult):
                lost = [RequestPart((), {party.name: own})]
                none_N = np.zeros(n, np.int64)
                return ServedScores(
                    columns_of(held, outputs), [unscored_state(own)] * n, lost, none_N
                )
            state_N = own.states()
            solo = held.solo(own, own.rows[own.rows >= 0])
        if solo is None:
            raise InternalError(f"{party.name}: the run has no student")
        known_N = state_N == EMBEDDED
        outputs[torch.from_numpy(known_N)] = solo.cpu()
        finite_N = outputs.isfinite().all(dim=1).numpy()
        outputs[torch.from_numpy(~finite_N)] = 0.0
        there = RequestPart((party.name,), {}, self._quality.student)
        scored = state_of(there, self._quality, min_quality)
        state: list[State] = [
            unscored_state(WHY[code]) if code in WHY else scored if finite else "failed"
            for code, finite in zip(state_N.tolist(), finite_N, strict=True)
        ]
        parts = [there, *(RequestPart((), {party.name: WHY[code]}) for code in _LOST)]
        number_N = np.select([state_N == code for code in _LOST], range(1, len(_LOST) + 1), 0)
        return ServedScores(columns_of(held, outputs), state, parts, number_N)
