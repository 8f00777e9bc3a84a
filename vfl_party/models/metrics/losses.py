"""The loss of a task, and what its outputs mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.task import (
    FocalSettings,
    HuberSettings,
    PluginLossSettings,
    QuantileSettings,
    TaskSettings,
)
from vfl_party.models.metrics.plugin_loss import rows_loss

# The pairs of rows that are compared at once: some 100 MB.
_MAX_PAIRS = 1 << 21


class TaskLoss(Protocol):
    """A task's loss."""

    def __call__(
        self, outputs_NO: Tensor, targets: Tensor, weights_N: Tensor | None = None, /
    ) -> Tensor:
        """Returns the mean over the rows of each row's loss times its weight, a scalar.

        It is divided by the number of rows, not by the sum of the weights: so the losses of a
        batch's parts add to that of the batch. ``weights_N``: None, if all rows count 1.
        """
        ...


class _Reducible(Protocol):
    def __call__(self, outputs_NO: Tensor, targets: Tensor, /, *, reduction: str) -> Tensor: ...


def loss_fn(task: TaskSettings) -> TaskLoss:
    """Returns the task's loss, ``task.loss`` with ``task.label_smoothing``.

    ``binary``: logits [N, 1], targets float [N, 1] of 0 and 1. ``multiclass``: logits [N, classes],
    targets int64 [N]. ``multilabel``: logits [N, labels], targets float [N, labels] of 0 and 1.
    ``regression``: values [N, 1], or their logarithms (``poisson``), targets float [N, 1], both
    scaled. ``survival``: logarithms of hazards [N, 1], targets float [N, 2], a time and 1 if it
    happened then. ``ranking``: scores [N, 1], targets float [N, 2], how relevant a row is and the
    number of its query. The rows of a call of the last two are compared with each other, and have
    no weights.
    """
    of = _reducible(task)

    def loss(outputs_NO: Tensor, targets: Tensor, weights_N: Tensor | None = None, /) -> Tensor:
        if weights_N is None:
            return of(outputs_NO, targets, reduction="mean")
        each_N = of(outputs_NO, targets, reduction="none").reshape(len(outputs_NO), -1).mean(dim=1)
        return (each_N * weights_N).mean()

    return loss


def scores(task: TaskSettings, outputs_NO: Tensor) -> Tensor:
    """Returns predictions of the same shape: probabilities from logits, or the (scaled) values of a
    regression.
    """
    if task.kind in ("binary", "multilabel"):
        return outputs_NO.sigmoid()
    if task.kind == "multiclass":
        return outputs_NO.softmax(dim=1)
    return outputs_NO.exp() if task.counts else outputs_NO


def _reducible(task: TaskSettings) -> _Reducible:
    match task.loss:
        case None:
            return _of_kind(task)
        case FocalSettings():
            return _focal(task, task.loss.gamma)
        case QuantileSettings():
            return _pinball(task.loss.q)
        case HuberSettings():
            return _huber(task.loss.delta)
        case PluginLossSettings():
            return _of_plugin(task.loss)
        case _:
            return _PLAIN[task.loss.kind]


def _of_kind(task: TaskSettings) -> _Reducible:
    smoothing = task.label_smoothing
    if task.kind == "regression":
        return F.mse_loss
    if task.kind == "survival":
        return _cox
    if task.kind == "ranking":
        return _ranknet
    if task.kind == "multiclass":
        return _smooth_classes(smoothing) if smoothing else F.cross_entropy
    logits = F.binary_cross_entropy_with_logits
    return _smooth_halves(smoothing) if smoothing else logits


def _smooth_classes(smoothing: float) -> _Reducible:
    def loss(outputs_NC: Tensor, targets_N: Tensor, /, *, reduction: str) -> Tensor:
        return F.cross_entropy(
            outputs_NC, targets_N, reduction=reduction, label_smoothing=smoothing
        )

    return loss


def _smooth_halves(smoothing: float) -> _Reducible:
    def loss(outputs_NO: Tensor, targets_NO: Tensor, /, *, reduction: str) -> Tensor:
        # With two classes, half of the smoothing goes to each.
        soft_NO = targets_NO * (1.0 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs_NO, soft_NO, reduction=reduction)

    return loss


def _focal(task: TaskSettings, gamma: float) -> _Reducible:
    """Equation 4 of Lin et al. 2017, arXiv 1708.02002, from logarithms: the gradient is finite for
    every gamma.
    """

    def loss(outputs_NO: Tensor, targets: Tensor, /, *, reduction: str) -> Tensor:
        if task.kind == "multiclass":
            log_all_NC = outputs_NO.log_softmax(dim=1)
            entropy = -log_all_NC.gather(1, targets[:, None])
            others_NC = log_all_NC.scatter(1, targets[:, None], -torch.inf)
            log_wrong = others_NC.logsumexp(dim=1, keepdim=True)
        else:
            towards = outputs_NO * (2.0 * targets - 1.0)
            entropy, log_wrong = F.softplus(-towards), F.logsigmoid(-towards)
        losses = (gamma * log_wrong).exp() * entropy
        return losses.mean() if reduction == "mean" else losses

    return loss


def _of_plugin(settings: PluginLossSettings) -> _Reducible:
    of_rows = rows_loss(settings)

    def loss(outputs_NO: Tensor, targets: Tensor, /, *, reduction: str) -> Tensor:
        each_N = of_rows(outputs_NO, targets)
        return each_N.mean() if reduction == "mean" else each_N

    return loss


def _pinball(q: float) -> _Reducible:
    def loss(outputs_N1: Tensor, targets_N1: Tensor, /, *, reduction: str) -> Tensor:
        above = targets_N1 - outputs_N1
        losses = torch.maximum(q * above, (q - 1.0) * above)
        return losses.mean() if reduction == "mean" else losses

    return loss


def _huber(delta: float) -> _Reducible:
    def loss(outputs_N1: Tensor, targets_N1: Tensor, /, *, reduction: str) -> Tensor:
        return F.huber_loss(outputs_N1, targets_N1, reduction=reduction, delta=delta)

    return loss


def _cox(outputs_N1: Tensor, targets_N2: Tensor, /, *, reduction: str) -> Tensor:
    """The negative logarithm of the partial likelihood (Cox 1972) with Breslow's ties, a mean over
    the rows to which it happened; 0 if it happened to none.
    """
    time_N, order = targets_N2[:, 0].sort(descending=True, stable=True)
    hazard_N, event_N = outputs_N1[order, 0], targets_N2[order, 1]
    # Rows with the same time are at risk, too.
    last_N = torch.searchsorted(-time_N, -time_N, right=True) - 1
    each_N = event_N * (hazard_N.logcumsumexp(dim=0)[last_N] - hazard_N)
    if reduction == "none":
        return each_N[order.argsort()]
    return each_N.sum() / event_N.sum().clamp_min(1.0)


def _ranknet(outputs_N1: Tensor, targets_N2: Tensor, /, *, reduction: str) -> Tensor:
    """Equation 3 of Burges et al. 2005 for the pairs of rows of a query of which the first is more
    relevant, a mean over the pairs; 0 if there is none.
    """
    relevance_N, one_by_one = targets_N2[:, 0], reduction == "none"
    total = torch.zeros_like(outputs_N1[:, 0]) if one_by_one else outputs_N1.new_zeros(())
    count = 0
    for first_P, second_P in pairs(targets_N2[:, 1]):
        ordered_P = relevance_N[first_P] > relevance_N[second_P]
        first_P, second_P = first_P[ordered_P], second_P[ordered_P]
        each_P = F.softplus(outputs_N1[second_P, 0] - outputs_N1[first_P, 0])
        count += len(each_P)
        # A sum over no pairs has a gradient, too.
        total = total.index_add(0, first_P, each_P) if one_by_one else total + each_P.sum()
    return total if one_by_one else total / max(1, count)


def _listnet(outputs_N1: Tensor, targets_N2: Tensor, /, *, reduction: str) -> Tensor:
    """Equation 5 of Cao et al. 2007 with their top-one probabilities, a mean over the queries of
    two rows or more; 0 if there is none.
    """
    query_N, sizes_N = torch.unique(targets_N2[:, 1], return_inverse=True, return_counts=True)[1:]
    wanted_N = _log_softmax_of(targets_N2[:, 0], query_N, len(sizes_N)).exp()
    each_N = -wanted_N * _log_softmax_of(outputs_N1[:, 0], query_N, len(sizes_N))
    if reduction == "none":
        return each_N
    return each_N.sum() / max(1, int((sizes_N > 1).sum()))


def _log_softmax_of(values_N: Tensor, query_N: Tensor, queries: int) -> Tensor:
    """Returns the logarithm of the softmax over the rows of each query."""
    max_Q = values_N.new_full((queries,), -torch.inf)
    max_Q = max_Q.scatter_reduce(0, query_N, values_N.detach(), "amax")
    less_N = values_N - max_Q[query_N]
    sums_Q = values_N.new_zeros(queries).index_add(0, query_N, less_N.exp())
    found_N: Tensor = less_N - sums_Q.log()[query_N]
    return found_N


def pairs(query_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the places [P] of the first and the second row of all ordered pairs of rows of one
    query, each row with itself too.

    They come in parts of about ``_MAX_PAIRS``: all rows of a split may be of one query.
    """
    order = query_N.argsort(stable=True)
    sizes_Q = torch.unique_consecutive(query_N[order], return_counts=True)[1]
    size_N, end_N = (
        values_Q.repeat_interleave(sizes_Q) for values_Q in (sizes_Q, sizes_Q.cumsum(0))
    )
    step = max(1, _MAX_PAIRS // int(sizes_Q.max()) if len(order) else 1)
    parts = (torch.split(values_N, step) for values_N in (size_N, end_N, order))
    for size_R, end_R, order_R in zip(*parts, strict=True):
        row_P = torch.arange(len(order_R), device=order.device).repeat_interleave(size_R)
        # The first pair of a row has the first row of its query.
        begin_R = size_R.cumsum(0) - size_R
        at_P = torch.arange(len(row_P), device=order.device) - begin_R[row_P]
        yield order_R[row_P], order[(end_R - size_R)[row_P] + at_P]


def _poisson(outputs_N1: Tensor, targets_N1: Tensor, /, *, reduction: str) -> Tensor:
    return F.poisson_nll_loss(outputs_N1, targets_N1, log_input=True, reduction=reduction)


_PLAIN: dict[str, _Reducible] = {
    "mae": F.l1_loss,
    "poisson": _poisson,
    "ranknet": _ranknet,
    "listnet": _listnet,
}
