"""Two runs of one model: who is scored with which, and how far their scores are apart."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vfl_party.serve.scored import ServedScores

# The column of a result that has a decision.
_DECISION = "class"


def shares(ids: Sequence[str], weights: Mapping[str, float], salt: str) -> npt.NDArray[np.int64]:
    """Returns the number of each id's run in ``weights``, [N], or -1 for none of them: always the
    same for an id, and of many ids to each run its weight.

    ``salt``: the model's name, so that the same people are not first in each model.
    """
    ends = np.cumsum([*weights.values()])
    digests = (hashlib.sha256(f"{salt}\0{name}".encode()).digest() for name in ids)
    at = np.fromiter((int.from_bytes(digest[:6]) / 2**48 for digest in digests), float, len(ids))
    index = np.searchsorted(ends, at, side="right").astype(np.int64)
    return np.where(index < len(ends), index, -1)


@dataclass
class Disagreement:
    """How far a shadow's scores are from those that were answered; any thread may count.

    ``rows``: those that both have scored with the same parties. ``others``: those that not.
    ``decided``: of ``rows``, those with another decision. ``difference``: the sum over ``rows`` of
    the mean absolute difference of a row's scores.
    """

    rows: int = 0
    others: int = 0
    decided: int = 0
    difference: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def compare(self, answered: ServedScores, shadow: ServedScores | None) -> None:
        """Counts the rows of a request. ``shadow``: None if the shadow could not score them."""
        if shadow is None:
            with self.lock:
                self.others += len(answered)
            return
        both = np.array(
            [
                mine and its and answered.part(at).parties == shadow.part(at).parties
                for at, (mine, its) in enumerate(
                    zip(answered.has_score, shadow.has_score, strict=True)
                )
            ],
            bool,
        )
        names = [
            name
            for name, values in answered.columns.items()
            if name != _DECISION
            and name in shadow.columns
            and np.issubdtype(values.dtype, np.floating)
        ]
        apart = [np.abs(answered.columns[name] - shadow.columns[name])[both] for name in names]
        mean_N = np.mean(apart, axis=0) if apart else np.zeros(0)
        decided = 0
        if _DECISION in answered.columns and _DECISION in shadow.columns:
            differs = answered.columns[_DECISION] != shadow.columns[_DECISION]
            decided = int(np.count_nonzero(np.asarray(differs)[both]))
        with self.lock:
            self.rows += int(both.sum())
            self.others += int((~both).sum())
            self.decided += decided
            self.difference += float(mean_N.sum(dtype=np.float64))
