"""Losses, weights, thresholds and metrics of a task from their definitions, with plain torch and
numpy.

It shares nothing with ``vfl_party.models.metrics`` and ``vfl_party.data.inputs.weights``.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from sklearn import metrics as sk
from torch import Tensor

from vfl_common.config.recipe import Recipe
from vfl_common.config.task import (
    FocalSettings,
    HuberSettings,
    QuantileSettings,
    TaskSettings,
    ThresholdRule,
)

Array = np.ndarray[Any, Any]


def losses_of_rows(task: TaskSettings, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns each row's loss, [B]; of several labels, the mean over these."""
    loss, smoothing = task.loss, task.label_smoothing
    if task.kind == "survival":
        return _cox(outputs, targets)
    if task.kind == "ranking":
        listnet = loss is not None and loss.kind == "listnet"
        return (_listnet if listnet else _ranknet)(outputs[:, 0], *targets.unbind(dim=1))
    if task.kind == "regression":
        error, target = (targets - outputs)[:, 0], targets[:, 0]
        if loss is None:
            return error**2
        if isinstance(loss, QuantileSettings):
            return torch.where(error >= 0, loss.q * error, (loss.q - 1) * error)
        if isinstance(loss, HuberSettings):
            d, size = loss.delta, error.abs()
            return torch.where(size <= d, 0.5 * error**2, d * (size - 0.5 * d))
        if loss.kind == "mae":
            return error.abs()
        rate = outputs[:, 0].exp()
        return rate - target * outputs[:, 0]
    if task.kind == "multiclass":
        count = outputs.shape[1]
        p = outputs.softmax(dim=1)
        hot = torch.nn.functional.one_hot(targets, count).to(p.dtype)
    else:
        count = 2
        yes = outputs.sigmoid()
        p, hot = torch.stack([1 - yes, yes]), torch.stack([1 - targets, targets])
    dim = 1 if task.kind == "multiclass" else 0
    if isinstance(loss, FocalSettings):
        of_class = (p * hot).sum(dim=dim)
        each = -((1 - of_class) ** loss.gamma) * of_class.log()
    else:
        wanted = hot * (1 - smoothing) + smoothing / count
        each = -(wanted * p.log()).sum(dim=dim)
    return each if task.kind == "multiclass" else each.mean(dim=1)


def _cox(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns a row for each event: -log(exp(h_i) / sum of exp(h_j) over the rows at risk then)."""
    h, times, events = outputs[:, 0], targets[:, 0], targets[:, 1]
    found = [
        -(h[i].exp() / h[times >= times[i]].exp().sum()).log()
        for i in range(len(h))
        if events[i] == 1
    ]
    return torch.stack(found) if found else 0.0 * h


def _ranknet(s: Tensor, relevance: Tensor, query: Tensor) -> Tensor:
    """Returns a row for each pair of a query: -log P(the more relevant one comes first)."""
    found = [
        -(1 / (1 + (s[j] - s[i]).exp())).log()
        for i, j in itertools.permutations(range(len(s)), 2)
        if query[i] == query[j] and relevance[i] > relevance[j]
    ]
    return torch.stack(found) if found else 0.0 * s


def _listnet(s: Tensor, relevance: Tensor, query: Tensor) -> Tensor:
    """Returns a row for each query of two rows or more: the cross-entropy of its two softmaxes."""
    found = [
        -(relevance[at].softmax(0) * s[at].softmax(0).log()).sum()
        for each in query.unique()
        if len(at := (query == each).nonzero()[:, 0]) > 1
    ]
    return torch.stack(found) if found else 0.0 * s


def ndcg_of(scores: Array, relevance: Array, query: Array, k: int | None = None) -> float:
    """The mean of scikit-learn's NDCG over queries of two rows or more of which one is relevant."""
    found = [
        sk.ndcg_score(relevance[at][None], scores[at][None], k=k)
        for each in np.unique(query)
        if len(at := np.flatnonzero(query == each)) > 1 and relevance[at].max() > 0
    ]
    return float(np.mean(found))


def c_index_of(risk: Array, times: Array, events: Array) -> float:
    """Harrell's C, pair by pair."""
    right, pairs = 0.0, 0
    for i in range(len(risk)):
        for j in range(len(risk)):
            after = times[j] > times[i] or (times[j] == times[i] and events[j] == 0)
            if events[i] == 1 and after:
                pairs += 1
                right += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    return right / pairs


def weights_of_rows(
    recipe: Recipe, labels: Array, column: Array | None, train: Array
) -> Tensor | None:
    """Returns each row's weight. ``labels``: as the table has them; ``column``: of weights."""
    how = recipe.task.class_weight
    if how is None and column is None:
        return None
    found = np.ones(len(labels)) if column is None else column.astype(float)
    if how == "balanced":
        of_train = labels[train].tolist()
        classes = set(labels.tolist())
        found = found * [
            len(of_train) / (len(classes) * of_train.count(each)) for each in labels.tolist()
        ]
    elif how is not None:
        named = {float(key) if labels.dtype.kind == "f" else key: w for key, w in how.items()}
        found = found * [named.get(each, 1.0) for each in labels.tolist()]
    return torch.from_numpy(found / found[train].mean()).to(torch.get_default_dtype())


def threshold_of(rule: ThresholdRule, p: Array, y: Array) -> float:
    """Tries every cut between two scores, and above and below all of them."""
    ends = [1.0, *sorted(set(p.tolist()), reverse=True), 0.0]
    best, found = -np.inf, 0.5
    for upper, lower in itertools.pairwise(ends):
        cut = (upper + lower) / 2
        guess = p > cut
        hits, false, missed = (
            (guess & (y == 1)).sum(),
            (guess & (y == 0)).sum(),
            (~guess & (y == 1)).sum(),
        )
        if rule.rule == "f1":
            worth = 2 * hits / max(1, 2 * hits + false + missed)
        elif rule.rule == "rate":
            worth = -abs(guess.mean() - rule.rate)
        else:
            worth = -(false * rule.false_positive + missed * rule.false_negative)
        if worth > best:
            best, found = worth, cut
    return found
