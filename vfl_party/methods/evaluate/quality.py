"""Computes one metric for the outputs of a split, and its bootstrap (Efron 1979)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.models.metrics import evaluate, first_metric
from vfl_party.phases.context import Party
from vfl_party.phases.measure import get_threshold


def select_metric(task: TaskSettings, phase: str, recipe_metric: str | None) -> str:
    """Returns the metric by which a phase measures parties. ``recipe_metric``: the metric in the
    recipe. Raises InputError if the task has no such metric.
    """
    name = recipe_metric or first_metric(task)
    if name not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: metric: not a metric of a {task.kind} task (got {name!r}). "
            f"Choose one of {', '.join(task.all_metrics)}, or add others in task.metrics.",
        )
    return name


class MetricJudge:
    """Computes the metric for outputs of the rows of a split, at the active party.

    All outputs are measured on the same bootstrap samples, which ``seed`` determines. In a ranking
    task, queries are drawn instead of rows, because NDCG is a mean over queries.
    """

    def __init__(
        self, party: Party, metric: str, rows: Rows, *, draws: int = 0, seed: int = 0
    ) -> None:
        self._task, self._metric = party.recipe.task, metric
        labels, targets = party.need_labels()
        self._labels, self._threshold = labels, get_threshold(party)
        self._targets = party.take(targets, rows).cpu()
        weights = party.row_weights(party.rows("train"))
        self._weights = None if weights is None else party.take(weights, rows).cpu()
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
