"""Measures the trained model with the embeddings of each set of parties, and computes each party's
contribution. The active party does this alone, with embeddings that it has already received.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_common.summary import PartyValue, SetQuality, Worth
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation
from vfl_party.methods.evaluate.settings import EvaluateSettings, select_metric
from vfl_party.models.metrics import evaluate, lower_is_better
from vfl_party.phases.context import Party
from vfl_party.phases.measure import get_threshold
from vfl_party.phases.scoring import Chunk, SplitScorer
from vfl_party.phases.stand_in import replace_missing

# Shapley values of parties (Shapley 1953), from the qualities of sets of parties.
#
# A party's value is the mean gain in quality when the party joins the parties before it, over all
# orders of the parties. A quality is a number, or an array with the quality on the original rows
# and on each bootstrap sample. The samples give the standard error of a value.

Players = frozenset[str]
Qualities = Mapping[Players, npt.NDArray[np.float64]]
# The maximum number of parties for which all sets (64) are measured.
MAX_EXACT = 6


def list_all_sets(players: Sequence[str]) -> list[Players]:
    """Returns all 2^K sets of players, the smallest first."""
    sizes = range(len(players) + 1)
    return [
        frozenset(members) for size in sizes for members in itertools.combinations(players, size)
    ]


def list_some_sets(players: Sequence[str], orders: Iterable[Sequence[str]]) -> list[Players]:
    """Returns some sets of players, the smallest first: the empty set, each single player, all
    players except one, all players, and the first players of each of ``orders``.
    """
    everyone = frozenset(players)
    sets = {frozenset[str](), everyone}
    sets |= {frozenset({player}) for player in players} | {
        everyone - {player} for player in players
    }
    for order in orders:
        sets |= {frozenset(order[:end]) for end in range(len(order))}
    place = {name: number for number, name in enumerate(players)}
    return sorted(sets, key=lambda members: (len(members), sorted(place[name] for name in members)))


def compute_exact_values(
    players: Sequence[str], quality: Qualities
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: its Shapley value [...]} from the quality v of all sets. The value is the
    sum of |S|! (K − |S| − 1)! / K! · (v(S with the player) − v(S)) over the sets S without the
    player.
    """
    count = len(players)
    weight = [1 / (count * math.comb(count - 1, size)) for size in range(count)]
    values = {}
    for player in players:
        without = [members for members in list_all_sets(players) if player not in members]
        values[player] = sum(
            (
                weight[len(members)] * (quality[members | {player}] - quality[members])
                for members in without
            ),
            start=np.zeros_like(quality[frozenset()]),
        )
    return values


def compute_additions(
    orders: Sequence[Sequence[str]], quality: Qualities
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns {player: the quality that it adds in each order, [orders, …]}. The mean over the
    orders estimates the player's value (Castro, Gómez and Tejada 2009).
    """
    additions: dict[str, list[npt.NDArray[np.float64]]] = {name: [] for name in orders[0]}
    for order in orders:
        for end, name in enumerate(order):
            before = frozenset(order[:end])
            additions[name].append(quality[before | {name}] - quality[before])
    return {name: np.stack(values) for name, values in additions.items()}


class MetricJudge:
    """Computes the metric for outputs of the rows of a split, at the active party.

    All outputs are measured on the same bootstrap samples (Efron 1979), which ``seed`` determines.
    In a ranking task, queries are drawn instead of rows, because NDCG is a mean over queries.
    """

    def __init__(
        self, party: Party, metric: str, rows: Rows, *, draws: int = 0, seed: int = 0
    ) -> None:
        self._task, self._metric = party.recipe.task, metric
        labels, targets = party.rows.need_labels()
        self._labels, self._threshold = labels, get_threshold(party)
        self._targets = party.rows.take(targets, rows).cpu()
        weights = party.rows.compute_weights(party.rows.get("train"))
        self._weights = None if weights is None else party.rows.take(weights, rows).cpu()
        random = np.random.Generator(np.random.Philox(key=seed))
        self._samples = [self._draw_sample(random) for _ in range(draws)]

    def measure(self, outputs_NO: Tensor) -> float:
        """Returns the metric of the outputs [N, O] of all rows; NaN if it is undefined."""
        return self._evaluate(outputs_NO.cpu(), self._targets, self._weights)

    def resample(self, outputs_NO: Tensor) -> npt.NDArray[np.float64]:
        """Returns the metric on each bootstrap sample, [draws]; NaN where it is undefined."""
        outputs_NO = outputs_NO.cpu()
        values = []
        for places, targets in self._samples:
            weights = None if self._weights is None else self._weights[places]
            values.append(self._evaluate(outputs_NO[places], targets, weights))
        return np.array(values)

    def _evaluate(self, outputs_NO: Tensor, targets: Tensor, weights: Tensor | None) -> float:
        metrics = evaluate(
            self._task,
            self._labels.select_known(outputs_NO),
            targets,
            self._labels.unscale,
            weights_N=weights,
            threshold=self._threshold,
        )
        return metrics.get(self._metric, float("nan"))

    def _draw_sample(self, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draws a bootstrap sample and returns the positions [N] of its rows and their targets."""
        n = len(self._targets)
        if self._task.kind != "ranking":
            places = torch.from_numpy(random.integers(0, n, n))
            return places, self._targets[places]
        query_N = self._targets[:, 1]
        queries = torch.from_numpy(np.unique(query_N.numpy()))
        drawn_queries = queries[torch.from_numpy(random.integers(0, len(queries), len(queries)))]
        places_by_query = [(query_N == query).nonzero().flatten() for query in drawn_queries]
        places = torch.cat(places_by_query)
        targets = self._targets[places].clone()
        # A query that is drawn twice counts as two queries, so each gets a new number.
        sizes = torch.tensor([len(query_places) for query_places in places_by_query])
        targets[:, 1] = (
            torch.arange(len(places_by_query)).repeat_interleave(sizes).to(targets.dtype)
        )
        return places, targets


# Shapley values are computed on the first of these splits that has rows.
_SHAPLEY_SPLITS = ("test", "validation")
# {split: (its rows, the embeddings of all parties for these rows)}.
Embedded: TypeAlias = Mapping[str, tuple[Rows, Sequence[Chunk]]]
Values: TypeAlias = dict[str, npt.NDArray[np.float64]]


@dataclass
class _SetMetrics:
    """The metrics of sets of parties.

    ``by_split``: {split: {set: metric}}. ``drawn``: {set: metrics [1 + draws]} on the split for
    Shapley values: on the original rows, then on each bootstrap sample.
    """

    by_split: dict[str, dict[Players, float]]
    drawn: dict[Players, npt.NDArray[np.float64]]


class Subsets:
    """Measures the quality of sets of parties, at the active party.

    Args:
        phase: The phase's name.
        scorer: Computes the outputs for embeddings.

    Raises InputError if there are no validation or test rows.
    """

    def __init__(
        self, party: Party, phase: str, settings: EvaluateSettings, scorer: SplitScorer
    ) -> None:
        self._party, self._phase, self._settings, self._scorer = party, phase, settings, scorer
        self._metric = select_metric(party.recipe.task, phase, settings.metric)
        self._players = [member.name for member in party.recipe.parties if member.features]
        self._seed = derive_seed(party.recipe.seed, "worth", phase)
        self.splits = [
            split
            for split in _SHAPLEY_SPLITS
            if split in settings.splits and len(party.rows.get(split))
        ]
        if not self.splits:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: subsets needs validation or test rows (got none). Set "
                "rows.validation or rows.test.",
            )

    def measure(self, embedded: Embedded, stand_in: Mapping[str, Tensor]) -> Worth:
        """Returns the quality of sets of parties, and the contribution of each party.

        ``stand_in``: {party: the embedding [1, D] that replaces its embeddings}.
        """
        count = len(self._players)
        orders = [] if count <= MAX_EXACT else self._draw_orders()
        sets = list_some_sets(self._players, orders) if orders else list_all_sets(self._players)
        measured = self._measure_sets(sets, embedded, stand_in)
        # The result lists only the basic sets, because drawn orders may contain thousands of sets.
        listed_sets = list_some_sets(self._players, []) if orders else sets
        return Worth(
            metric=self._metric,
            lower_is_better=lower_is_better(self._party.recipe.task, self._metric),
            absent=self._settings.absent,
            split=self.splits[0],
            permutations=len(orders),
            subsets=[self._get_quality(members, measured) for members in listed_sets],
            shapley=self._compute_values(orders, measured.drawn),
        )

    def _draw_orders(self) -> list[list[str]]:
        """Draws orders of the parties."""
        players = self._players
        return [
            [
                players[at]
                for at in draw_permutation(derive_seed(self._seed, "order", n), len(players))
            ]
            for n in range(self._settings.permutations)
        ]

    def _measure_sets(
        self, sets: Sequence[Players], embedded: Embedded, stand_in: Mapping[str, Tensor]
    ) -> _SetMetrics:
        measured = _SetMetrics({split: {} for split in self.splits}, {})
        for split in self.splits:
            rows, chunks = embedded[split]
            resampled = split == self.splits[0]
            draws, seed = self._settings.resamples, derive_seed(self._seed, "rows")
            judge = MetricJudge(
                self._party, self._metric, rows, draws=draws if resampled else 0, seed=seed
            )
            compute_outputs = self._make_scoring(chunks, stand_in)
            for number, members in enumerate(sets, 1):
                outputs = compute_outputs(members)
                value = measured.by_split[split][members] = judge.measure(outputs)
                if resampled:
                    measured.drawn[members] = np.array([value, *judge.resample(outputs)])
                    self._party.hooks.tick(self._phase, 0, 1, number, len(sets))
        return measured

    def _make_scoring(
        self, chunks: Sequence[Chunk], stand_in: Mapping[str, Tensor]
    ) -> Callable[[Players], Tensor]:
        own_name, scorer, tolerates_absence = (
            self._party.name,
            self._scorer,
            self._party.course.copes,
        )

        def compute_outputs(members: Players) -> Tensor:
            if members:
                return scorer.scored(select(chunks, members)).outputs
            # Without parties all rows are equal, but matrix products may round them differently. So
            # one row is computed and repeated.
            single_row = select([chunks[0].first()], members)
            return scorer.scored(single_row).outputs.expand(sum(chunk.rows for chunk in chunks), -1)

        def select(all_chunks: Sequence[Chunk], members: Players) -> list[Chunk]:
            selected = replace_missing(all_chunks, own_name, members, stand_in)
            # A model that was trained to work without passive parties gets no embeddings for absent
            # ones.
            return (
                [chunk.of(members) for chunk in selected]
                if tolerates_absence and (members or selected[0].own)
                else selected
            )

        return compute_outputs

    def _get_quality(self, members: Players, measured: _SetMetrics) -> SetQuality:
        names = [player for player in self._players if player in members]
        values = {
            split: _replace_nonfinite(by_set[members])
            for split, by_set in measured.by_split.items()
        }
        return SetQuality(parties=names, **values)

    def _compute_values(
        self, orders: Sequence[Sequence[str]], drawn: dict[Players, npt.NDArray[np.float64]]
    ) -> dict[str, PartyValue]:
        """Returns each party's value and standard error. The error covers the sampling of rows and,
        if orders are drawn, the sampling of orders.
        """
        if not np.isfinite(drawn[frozenset()][0]):
            return {}
        spread: Values = {}
        if orders:
            additions_by_party = compute_additions(orders, drawn)
            values = {
                name: additions.mean(axis=0) for name, additions in additions_by_party.items()
            }
            spread = {name: additions[:, 0] for name, additions in additions_by_party.items()}
        else:
            values = compute_exact_values(self._players, drawn)
        return {
            name: PartyValue(
                value=float(samples[0]), error=_compute_error(samples[1:], spread.get(name))
            )
            for name, samples in values.items()
        }


def _compute_error(drawn: npt.NDArray[np.float64], spread: npt.NDArray[np.float64] | None) -> float:
    """Returns the standard error of a value. ``drawn``: the value in each bootstrap sample.
    ``spread``: the quality that the party adds in each order.
    """
    # The metric may be undefined, for example the AUC of a single class.
    drawn = drawn[np.isfinite(drawn)]
    row_variance = float(drawn.var(ddof=1)) if len(drawn) > 1 else 0.0
    order_variance = 0.0 if spread is None else float(spread.var(ddof=1)) / len(spread)
    return float(np.sqrt(row_variance + order_variance))


def _replace_nonfinite(value: float) -> float | None:
    return value if np.isfinite(value) else None
