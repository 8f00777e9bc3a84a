"""Shares a model's requests among its runs: by weights, and as copies to a shadow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from vfl_party.serve.batching import Busy, Given
from vfl_party.serve.http.served import Served, join_scores
from vfl_party.serve.models.compare import Disagreement, shares
from vfl_party.serve.scored import ServedScores

Ids = Sequence[str]


@dataclass
class Routed:
    """See ``vfl_party.serve.http.served.Routes``.

    Args:
        model: its name.
        find: returns a run that is loaded.
        spelt: returns ids as the parties have matched them.
        weights: {run id: share of the ids}.
        shadow: the run that scores a copy of each request; '' for none.
        disagreement: of the shadow.
    """

    model: str
    find: Callable[[str], Served | None]
    spelt: Callable[[Ids], Sequence[str | None]]
    weights: Mapping[str, float]
    shadow: str = ""
    disagreement: Disagreement = field(default_factory=Disagreement)

    async def score(
        self, now: Served, ids: Ids, min_quality: float | None, columns: Given | None
    ) -> ServedScores:
        """Scores rows with the runs of their shares; see ``Routes.score``."""
        scores = await self._share(now, ids, min_quality, columns)
        # The copy comes last, so that it does not delay the answer.
        self._copy(ids, columns, scores)
        return scores

    def usable(self, run_id: str, now: Served) -> Served | None:
        """Returns a run if it can answer in place of ``now``: all passive parties that attend
        ``now`` attend it, and its results have the same columns.
        """
        run = self.find(run_id)
        if run is None or run.columns.keys() != now.columns.keys():
            return None
        there = run.present()
        if any(party not in there for party in now.present()):
            return None
        return replace(run, instead=now.instead)

    async def _share(
        self, now: Served, ids: Ids, min_quality: float | None, columns: Given | None
    ) -> ServedScores:
        if not self.weights:
            return await now.answer(ids, min_quality, columns)
        of_N = shares([name or "" for name in self.spelt(ids)], self.weights, self.model)
        runs = [self.usable(run_id, now) or now for run_id in self.weights]
        # The last is for -1.
        served_N = [*runs, now]
        groups: dict[str, list[int]] = {}
        for at, number in enumerate(of_N.tolist()):
            groups.setdefault(served_N[number].run_id, []).append(at)
        of = {run.run_id: run for run in served_N}
        if len(groups) == 1:
            return await of[next(iter(groups))].answer(ids, min_quality, columns)
        parts = await asyncio.gather(
            *(
                of[run_id].answer([ids[at] for at in rows], min_quality, _rows(columns, rows))
                for run_id, rows in groups.items()
            )
        )
        order = np.concatenate([np.asarray(rows, np.int64) for rows in groups.values()])
        return join_scores(parts).ordered(_inverse(order))

    def _copy(self, ids: Ids, columns: Given | None, answered: ServedScores) -> None:
        """Asks the shadow for what others have answered, and waits for nothing."""
        runs = [part.run for part in answered.parts]
        rows = [
            at for at, part in enumerate(answered.of_part.tolist()) if runs[part] != self.shadow
        ]
        if not self.shadow or not rows:
            return
        answered = answered.ordered(np.asarray(rows, np.int64))
        shadow = self.find(self.shadow)
        try:
            copied = [ids[at] for at in rows]
            waiting = (
                shadow.submit(copied, None, _rows(columns, rows)) if shadow is not None else []
            )
        except Busy:
            waiting = []
        if shadow is None or not waiting:
            self.disagreement.compare(answered, None)
            return
        for start, future in zip(range(0, len(rows), shadow.max_at_once), waiting, strict=True):
            part = answered.taken(slice(start, start + shadow.max_at_once))
            future.add_done_callback(partial(self._compare, part))

    def _compare(self, answered: ServedScores, shadow: Future[ServedScores]) -> None:
        failed = shadow.cancelled() or shadow.exception() is not None
        self.disagreement.compare(answered, None if failed else shadow.result())


def _rows(columns: Given | None, rows: Sequence[int]) -> Given | None:
    if columns is None:
        return None
    return {name: [values[at] for at in rows] for name, values in columns.items()}


def _inverse(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    result = np.empty_like(order)
    result[order] = np.arange(len(order))
    return result
