"""Models with which the active party scores by itself: the run's student. Nobody is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vfl_common.errors import InternalError
from vfl_party.predict.quality import Quality
from vfl_party.serve.batching import Given
from vfl_party.serve.scored import Part, Scores, State
from vfl_party.serve.scorer import columns_of, state_of
from vfl_party.serve.store import Store


class AloneScorer:
    """Scores ids with the run's student; any thread may call it, several at once."""

    def __init__(self, store: Store, quality: Quality) -> None:
        self._store = store
        # What was measured of the student; that of sets of parties says nothing of it.
        self._quality = replace(quality, values={})

    @torch.no_grad()
    def score(
        self, ids: Sequence[str], least: float | None = None, columns: Given | None = None
    ) -> Scores:
        """Scores rows by id, in their order; see ``OnlineScorer.score``. Raises InputError."""
        held, n = self._store.held, len(ids)
        party = held.party
        outputs = torch.zeros(n, party.recipe.task.outputs)
        known_N = np.ones(n, bool)
        if columns is not None:
            found = held.solo_given(columns, n)
        else:
            rows = held.rows(held.spelt(ids))
            known_N = rows >= 0
            found = held.solo(rows[known_N])
        if found is None:
            raise InternalError(f"{party.name}: the run has no student")
        outputs[torch.from_numpy(known_N)] = found.cpu()
        finite_N = outputs.isfinite().all(dim=1).numpy()
        outputs[torch.from_numpy(~finite_N)] = 0.0
        there = Part((party.name,), {}, self._quality.student)
        parts = [there, Part((), {party.name: "unknown id"})]
        state: list[State] = [
            "unknown"
            if not known
            else state_of(there, self._quality, least)
            if finite
            else "failed"
            for known, finite in zip(known_N, finite_N, strict=True)
        ]
        return Scores(columns_of(held, outputs), state, parts, np.where(known_N, 0, 1))
