"""Models of rows that different parties hold: the first party that answers for an id embeds it, and
the active party's tail and head score it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt
from torch import Tensor

from vfl_common.errors import InternalError
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.cut import compute_features
from vfl_party.models.halves import Tail
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import compute_outputs
from vfl_party.serve.scored import RequestPart, State, Why
from vfl_party.serve.scorer import Embedded, OnlineScorer, state_of
from vfl_party.serve.store import Held

# Reason for a party that answered, but whose latents are not used.
_NOT_NEEDED: Why = "not needed"
# Reasons that are not faults.
_FINE: frozenset[Why] = frozenset((_NOT_NEEDED, "not answered"))


class HolderScorer(OnlineScorer):
    """Scores ids at the active party; see ``OnlineScorer``. If several parties answer for an id,
    the first of them in the recipe scores it, as in ``vfl predict``.
    """

    def _part(
        self,
        party: Party,
        names: Sequence[str],
        mask: npt.NDArray[Any],
        rows: Rows,
        why: Mapping[str, npt.NDArray[Any] | Why],
    ) -> RequestPart:
        part = super()._part(party, names, mask, rows, why)
        first, others = part.parties[:1], part.parties[1:]
        missing = {**part.missing, **dict.fromkeys(others, _NOT_NEEDED)}
        ordered = {name: missing[name] for name in names if name in missing}
        return replace(part, parties=first, missing=ordered, quality=self._quality.of(first))

    def _state(self, party: Party, part: RequestPart, min_quality: float | None) -> State:
        _ = party
        amiss = {name: why for name, why in part.missing.items() if why not in _FINE}
        if not part.parties:
            # Who is missing may have the row.
            return "incomplete" if amiss else "unknown"
        return state_of(replace(part, missing=amiss), self._quality, min_quality)

    def _joint(self, held: Held, part: RequestPart, rows: Rows, embedded: Embedded) -> Tensor:
        party, tail = held.party, held.party.models.get("tail")
        if not isinstance(tail, Tail):
            raise InternalError(f"{party.name}: the model has no tail")
        (name,) = part.parties
        z = embedded.others[name][rows].to(party.device)
        return compute_outputs(party, compute_features(party, tail, z.reshape(-1, *tail.latent)))
