"""One metric of scored rows, and its bootstrap (Efron 1979)."""

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
from vfl_party.phases.measure import decides


def metric_of(task: TaskSettings, phase: str, named: str | None) -> str:
    """Returns the metric by which a phase judges parties. ``named``: the metric in the recipe.
    Raises InputError if the task has no such metric.
    """
    name = named or first_metric(task)
    if name not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: metric: not a metric of a {task.kind} task (got {name!r}). "
            f"Choose one of {', '.join(task.all_metrics)}, or add others in task.metrics.",
        )
    return name


class MetricJudge:
    """Measures outputs for the rows of a split, at the active party.

    All outputs are judged by the same bootstrap samples, which ``seed`` determines. A ranking draws
    queries instead of rows, because NDCG is a mean over queries.
    """

    def __init__(
        self, party: Party, metric: str, rows: Rows, *, draws: int = 0, seed: int = 0
    ) -> None:
        self._task, self._metric = party.recipe.task, metric
        labels, targets = party.need_labels()
        self._labels, self._threshold = labels, decides(party)
        self._targets = party.take(targets, rows).cpu()
        weights = party.row_weights(party.rows("train"))
        self._weights = None if weights is None else party.take(weights, rows).cpu()
        random = np.random.Generator(np.random.Philox(key=seed))
        self._draws = [self._draw(random) for _ in range(draws)]

    def of(self, outputs_NO: Tensor) -> float:
        """Returns the metric; NaN if it is undefined for the rows."""
        return self._measure(outputs_NO.cpu(), self._targets, self._weights)

    def resample(self, outputs_NO: Tensor) -> npt.NDArray[np.float64]:
        """Returns the metric of each sample, [draws]; NaN if it is undefined."""
        outputs_NO = outputs_NO.cpu()
        values = []
        for at, targets in self._draws:
            weights = None if self._weights is None else self._weights[at]
            values.append(self._measure(outputs_NO[at], targets, weights))
        return np.array(values)

    def _measure(self, outputs_NO: Tensor, targets: Tensor, weights: Tensor | None) -> float:
        metrics = evaluate(
            self._task,
            self._labels.select_known(outputs_NO),
            targets,
            self._labels.unscale,
            weights_N=weights,
            threshold=self._threshold,
        )
        return metrics.get(self._metric, float("nan"))

    def _draw(self, random: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draws a bootstrap sample of the rows; returns their places [N] and targets."""
        n = len(self._targets)
        if self._task.kind != "ranking":
            at = torch.from_numpy(random.integers(0, n, n))
            return at, self._targets[at]
        query_N = self._targets[:, 1]
        queries = torch.from_numpy(np.unique(query_N.numpy()))
        chosen = queries[torch.from_numpy(random.integers(0, len(queries), len(queries)))]
        parts = [(query_N == query).nonzero().flatten() for query in chosen]
        at = torch.cat(parts)
        targets = self._targets[at].clone()
        # A query that is drawn twice is two queries.
        sizes = torch.tensor([len(part) for part in parts])
        targets[:, 1] = torch.arange(len(parts)).repeat_interleave(sizes).to(targets.dtype)
        return at, targets
