"""Measures the trained model with the embeddings of each set of parties, and computes from it the
contribution of each party. The active party does this alone, with embeddings that it has received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_common.summary import PartyValue, SetQuality, Worth
from vfl_party.base.seeds import Rows, derive_seed, permutation
from vfl_party.methods.evaluate.quality import MetricJudge, metric_of
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.methods.evaluate.shapley import (
    MAX_EXACT,
    Players,
    additions_by_order,
    all_sets,
    exact_values,
    some_sets,
)
from vfl_party.models.metrics import lower_is_better
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Chunk, SplitScorer
from vfl_party.phases.stand_in import replace_missing

# The Shapley values are those of the first of these splits that has rows.
_LAST = ("test", "validation")
# {split: (its rows, the embeddings of all parties for them)}.
Embedded: TypeAlias = Mapping[str, tuple[Rows, Sequence[Chunk]]]
Values: TypeAlias = dict[str, npt.NDArray[np.float64]]


@dataclass
class _Measured:
    """The metrics of sets of parties.

    ``of``: {split: {set: metric}}. ``drawn``: {set: metrics of the last split [1 + draws]}, first
    of its original rows, then of each bootstrap sample.
    """

    of: dict[str, dict[Players, float]]
    drawn: dict[Players, npt.NDArray[np.float64]]


class Subsets:
    """Measures sets of parties, at the active party.

    Args:
        phase: the phase's name.
        scorer: computes the outputs for embeddings.

    Raises InputError if there are no rows to measure with.
    """

    def __init__(
        self, party: Party, phase: str, settings: EvaluateSettings, scorer: SplitScorer
    ) -> None:
        self._party, self._phase, self._settings, self._scorer = party, phase, settings, scorer
        self._metric = metric_of(party.recipe.task, phase, settings.metric)
        self._players = [member.name for member in party.recipe.parties if member.features]
        self._seed = derive_seed(party.recipe.seed, "worth", phase)
        self.splits = [
            split for split in _LAST if split in settings.splits and len(party.rows(split))
        ]
        if not self.splits:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: subsets needs validation or test rows (got none). Set "
                "rows.validation or rows.test.",
            )

    def measure(self, embedded: Embedded, stand_in: Mapping[str, Tensor]) -> Worth:
        """Returns the quality of sets of parties, and the contribution of each party.

        ``stand_in``: {party: the embedding that replaces its embeddings, [1, D]}.
        """
        count = len(self._players)
        orders = [] if count <= MAX_EXACT else self._orders()
        sets = some_sets(self._players, orders) if orders else all_sets(self._players)
        measured = self._measure(sets, embedded, stand_in)
        # Only these are listed: the drawn orders may pass through thousands of sets.
        listed_sets = some_sets(self._players, []) if orders else sets
        return Worth(
            metric=self._metric,
            lower_is_better=lower_is_better(self._party.recipe.task, self._metric),
            absent=self._settings.absent,
            split=self.splits[0],
            permutations=len(orders),
            subsets=[self._quality(members, measured) for members in listed_sets],
            shapley=self._shapley(orders, measured.drawn),
        )

    def _orders(self) -> list[list[str]]:
        """Draws orders of the parties."""
        players = self._players
        return [
            [players[at] for at in permutation(derive_seed(self._seed, "order", n), len(players))]
            for n in range(self._settings.permutations)
        ]

    def _measure(
        self, sets: Sequence[Players], embedded: Embedded, stand_in: Mapping[str, Tensor]
    ) -> _Measured:
        measured = _Measured({split: {} for split in self.splits}, {})
        for split in self.splits:
            rows, chunks = embedded[split]
            last = split == self.splits[0]
            draws, seed = self._settings.resamples, derive_seed(self._seed, "rows")
            judge = MetricJudge(
                self._party, self._metric, rows, draws=draws if last else 0, seed=seed
            )
            outputs_of = self._outputs(chunks, stand_in)
            for number, members in enumerate(sets, 1):
                outputs = outputs_of(members)
                value = measured.of[split][members] = judge.of(outputs)
                if last:
                    measured.drawn[members] = np.array([value, *judge.resample(outputs)])
                    self._party.tick(self._phase, 0, 1, number, len(sets))
        return measured

    def _outputs(
        self, chunks: Sequence[Chunk], stand_in: Mapping[str, Tensor]
    ) -> Callable[[Players], Tensor]:
        me, scorer, copes = self._party.name, self._scorer, self._party.course.copes

        def outputs(there: Players) -> Tensor:
            if there:
                return scorer.scored(only(chunks, there)).outputs
            # All rows are equal here, but matrix products may round them differently.
            one = only([chunks[0].first()], there)
            return scorer.scored(one).outputs.expand(sum(chunk.rows for chunk in chunks), -1)

        def only(whole: Sequence[Chunk], there: Players) -> list[Chunk]:
            parts = replace_missing(whole, me, there, stand_in)
            # A model that was trained to do without passive parties does so.
            return (
                [part.of(there) for part in parts] if copes and (there or parts[0].own) else parts
            )

        return outputs

    def _quality(self, of: Players, measured: _Measured) -> SetQuality:
        names = [player for player in self._players if player in of]
        values = {split: _or_none(by_set[of]) for split, by_set in measured.of.items()}
        return SetQuality(parties=names, **values)

    def _shapley(
        self, orders: Sequence[Sequence[str]], drawn: dict[Players, npt.NDArray[np.float64]]
    ) -> dict[str, PartyValue]:
        """Returns each party's value with its standard error, which covers the sampling of the rows
        and, if orders are drawn, of the orders.
        """
        if not np.isfinite(drawn[frozenset()][0]):
            return {}
        spread: Values = {}
        if orders:
            added = additions_by_order(orders, drawn)
            values = {name: additions.mean(axis=0) for name, additions in added.items()}
            spread = {name: additions[:, 0] for name, additions in added.items()}
        else:
            values = exact_values(self._players, drawn)
        return {
            name: PartyValue(value=float(samples[0]), error=_error(samples[1:], spread.get(name)))
            for name, samples in values.items()
        }


def _error(drawn: npt.NDArray[np.float64], spread: npt.NDArray[np.float64] | None) -> float:
    """Returns a standard error. ``drawn``: the value in each bootstrap sample. ``spread``: what the
    party adds in each order.
    """
    # The metric may be undefined, for example the AUC of a single class.
    drawn = drawn[np.isfinite(drawn)]
    of_rows = float(drawn.var(ddof=1)) if len(drawn) > 1 else 0.0
    of_orders = 0.0 if spread is None else float(spread.var(ddof=1)) / len(spread)
    return float(np.sqrt(of_rows + of_orders))


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None
