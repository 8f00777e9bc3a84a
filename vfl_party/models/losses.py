"""Builds the loss of a task, built in or of a plug-in, and turns a model's outputs into
predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.base import Section
from vfl_common.config.task import (
    LOSSES,
    FocalSettings,
    HuberSettings,
    PluginLossSettings,
    QuantileSettings,
    TaskSettings,
)
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import PlugIns, describe_failure
from vfl_party.models.external import NoSettings, describe_output, load_plugin

S = TypeVar("S", bound=Section)
# The maximum number of pairs of rows that are compared at once, which takes about 100 MB.
_MAX_PAIRS = 1 << 21


@dataclass(frozen=True)
class LossOfRows(Generic[S]):
    """The type that an entry point of ``vfl.losses`` names.

    Args:
        settings: The class of the settings in ``task.loss``, without ``kind``.
        compute: A function (settings, outputs, targets) -> the loss of each row [N], in the dtype
            of the outputs. The loss of a row must depend only on this row, because a batch may be
            computed in parts and rows are weighted. Outputs and targets are logits [N, 1] and float
            [N, 1] for ``binary``, logits [N, classes] and int64 [N] for ``multiclass``, logits [N,
            labels] and float [N, labels] for ``multilabel``, or scaled values [N, 1] and [N, 1] for
            ``regression``.
    """

    settings: type[S]
    compute: Callable[[S, Tensor, Tensor], Tensor]


LOSS_PLUGINS = PlugIns("vfl.losses", "loss", ours=LOSSES)
_WHERE = "recipe: task.loss"


class TaskLoss(Protocol):
    """The type of a loss function that ``loss_fn`` returns."""

    def __call__(
        self, outputs_NO: Tensor, targets: Tensor, weights_N: Tensor | None = None, /
    ) -> Tensor:
        """Returns the mean of the rows' weighted losses, a scalar.

        The sum is divided by the number of rows and not by the sum of the weights, so that the
        losses of parts of a batch add up to the loss of the batch. If ``weights_N`` is None, each
        row has the weight 1.
        """
        ...


class _Reducible(Protocol):
    def __call__(self, outputs_NO: Tensor, targets: Tensor, /, *, reduction: str) -> Tensor: ...


def loss_fn(task: TaskSettings) -> TaskLoss:
    """Returns the task's loss function: ``task.loss`` with ``task.label_smoothing``.

    The outputs and targets depend on the kind of task. ``binary``: logits [N, 1] and targets float
    [N, 1] of 0 and 1. ``multiclass``: logits [N, classes] and targets int64 [N]. ``multilabel``:
    logits [N, labels] and targets float [N, labels] of 0 and 1. ``regression``: scaled values [N,
    1], or their logarithms for ``poisson``, and scaled targets float [N, 1]. ``survival``:
    logarithms of hazards [N, 1] and targets float [N, 2], a time and 1 if the event happened at
    that time. ``ranking``: scores [N, 1] and targets float [N, 2], a relevance and the number of a
    query. ``survival`` and ``ranking`` compare the rows of a call with each other and do not
    support weights.
    """
    reducible_loss = _build_reducible_loss(task)

    def loss(outputs_NO: Tensor, targets: Tensor, weights_N: Tensor | None = None, /) -> Tensor:
        if weights_N is None:
            return reducible_loss(outputs_NO, targets, reduction="mean")
        losses_N = (
            reducible_loss(outputs_NO, targets, reduction="none")
            .reshape(len(outputs_NO), -1)
            .mean(dim=1)
        )
        return (losses_N * weights_N).mean()

    return loss


def scores(task: TaskSettings, outputs_NO: Tensor) -> Tensor:
    """Returns the predictions for a model's outputs, in the same shape.

    These are probabilities, or the scaled values of a regression.
    """
    if task.kind in ("binary", "multilabel"):
        return outputs_NO.sigmoid()
    if task.kind == "multiclass":
        return outputs_NO.softmax(dim=1)
    return outputs_NO.exp() if task.counts else outputs_NO


def _build_reducible_loss(task: TaskSettings) -> _Reducible:
    match task.loss:
        case None:
            return _default_loss(task)
        case FocalSettings():
            return _focal(task, task.loss.gamma)
        case QuantileSettings():
            return _pinball(task.loss.q)
        case HuberSettings():
            return partial(F.huber_loss, delta=task.loss.delta)
        case PluginLossSettings():
            return _plugin_loss(task.loss)
        case _:
            return _LOSSES[task.loss.kind]


def _default_loss(task: TaskSettings) -> _Reducible:
    smoothing = task.label_smoothing
    if task.kind == "regression":
        return F.mse_loss
    if task.kind == "survival":
        return _cox
    if task.kind == "ranking":
        return _ranknet
    if task.kind == "multiclass":
        return partial(F.cross_entropy, label_smoothing=smoothing) if smoothing else F.cross_entropy
    logits = F.binary_cross_entropy_with_logits
    return _smooth_binary(smoothing) if smoothing else logits


def _smooth_binary(smoothing: float) -> _Reducible:
    def loss(outputs_NO: Tensor, targets_NO: Tensor, /, *, reduction: str) -> Tensor:
        # Label smoothing is divided evenly among the classes, and there are two classes.
        soft_NO = targets_NO * (1.0 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs_NO, soft_NO, reduction=reduction)

    return loss


def _focal(task: TaskSettings, gamma: float) -> _Reducible:
    """Returns the focal loss, Equation 4 of Lin et al. 2017, arXiv 1708.02002.

    It is computed from logarithms, so that the gradient is finite for every gamma.
    """

    def loss(outputs_NO: Tensor, targets: Tensor, /, *, reduction: str) -> Tensor:
        if task.kind == "multiclass":
            log_all_NC = outputs_NO.log_softmax(dim=1)
            entropy = -log_all_NC.gather(1, targets[:, None])
            other_classes_NC = log_all_NC.scatter(1, targets[:, None], -torch.inf)
            log_wrong = other_classes_NC.logsumexp(dim=1, keepdim=True)
        else:
            signed_logits = outputs_NO * (2.0 * targets - 1.0)
            entropy, log_wrong = F.softplus(-signed_logits), F.logsigmoid(-signed_logits)
        losses = (gamma * log_wrong).exp() * entropy
        return losses.mean() if reduction == "mean" else losses

    return loss


def _plugin_loss(settings: PluginLossSettings) -> _Reducible:
    """Returns a plug-in's loss. A plug-in may export a bare function, which has no settings.

    Raises InputError if no installed plug-in has this loss or if its settings are invalid. The
    returned function raises InputError if the plug-in fails or does not return one number for each
    row.
    """
    export, parsed = load_plugin(LOSS_PLUGINS, settings, _WHERE, LossOfRows, _wrap_function)
    where = f"{_WHERE}: the loss {settings.kind!r}"

    def loss(outputs_NO: Tensor, targets: Tensor, /, *, reduction: str) -> Tensor:
        try:
            losses_N = export.compute(parsed, outputs_NO, targets)
        except VflError:
            raise
        # The plug-in may raise any exception.
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} failed {describe_failure(error)}. Correct the plug-in.",
            ) from error
        if (
            not isinstance(losses_N, Tensor)
            or losses_N.shape != outputs_NO.shape[:1]
            or losses_N.dtype != outputs_NO.dtype
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return {outputs_NO.dtype} of shape [{len(outputs_NO)}], one number "
                f"per row (got {describe_output(losses_N)}). Correct the plug-in.",
            )
        if outputs_NO.requires_grad and not losses_N.requires_grad:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where} must return numbers with a gradient. Compute them with torch.",
            )
        return losses_N.mean() if reduction == "mean" else losses_N

    return loss


def _wrap_function(function: Callable[[Tensor, Tensor], Tensor]) -> LossOfRows[NoSettings]:
    return LossOfRows(NoSettings, lambda _, outputs, targets: function(outputs, targets))


def _pinball(q: float) -> _Reducible:
    def loss(outputs_N1: Tensor, targets_N1: Tensor, /, *, reduction: str) -> Tensor:
        above = targets_N1 - outputs_N1
        losses = torch.maximum(q * above, (q - 1.0) * above)
        return losses.mean() if reduction == "mean" else losses

    return loss


def _cox(outputs_N1: Tensor, targets_N2: Tensor, /, *, reduction: str) -> Tensor:
    """Returns the negative log partial likelihood (Cox 1972) with Breslow's method for ties.

    It is a mean over the rows with an event, or 0 if no row has one.
    """
    time_N, order = targets_N2[:, 0].sort(descending=True, stable=True)
    hazard_N, event_N = outputs_N1[order, 0], targets_N2[order, 1]
    # The risk set of an event includes the rows with the same time.
    last_N = torch.searchsorted(-time_N, -time_N, right=True) - 1
    losses_N = event_N * (hazard_N.logcumsumexp(dim=0)[last_N] - hazard_N)
    if reduction == "none":
        return losses_N[order.argsort()]
    return losses_N.sum() / event_N.sum().clamp_min(1.0)


def _ranknet(outputs_N1: Tensor, targets_N2: Tensor, /, *, reduction: str) -> Tensor:
    """Returns the RankNet loss, Equation 3 of Burges et al. 2005.

    It is a mean over all pairs of rows of one query whose first row is more relevant, or 0 if there
    is no such pair.
    """
    relevance_N, is_per_row = targets_N2[:, 0], reduction == "none"
    total = torch.zeros_like(outputs_N1[:, 0]) if is_per_row else outputs_N1.new_zeros(())
    count = 0
    for first_P, second_P in yield_pairs(targets_N2[:, 1]):
        ordered_P = relevance_N[first_P] > relevance_N[second_P]
        first_P, second_P = first_P[ordered_P], second_P[ordered_P]
        losses_P = F.softplus(outputs_N1[second_P, 0] - outputs_N1[first_P, 0])
        count += len(losses_P)
        # A sum over no pairs still has a gradient of zeros, so no special case is needed.
        total = total.index_add(0, first_P, losses_P) if is_per_row else total + losses_P.sum()
    return total if is_per_row else total / max(1, count)


def _listnet(outputs_N1: Tensor, targets_N2: Tensor, /, *, reduction: str) -> Tensor:
    """Returns the ListNet loss with top-one probabilities, Equation 5 of Cao et al. 2007.

    It is a mean over the queries with two or more rows, or 0 if there is no such query.
    """
    query_N, sizes_N = torch.unique(targets_N2[:, 1], return_inverse=True, return_counts=True)[1:]
    target_probabilities_N = _log_softmax_by_query(targets_N2[:, 0], query_N, len(sizes_N)).exp()
    losses_N = -target_probabilities_N * _log_softmax_by_query(
        outputs_N1[:, 0], query_N, len(sizes_N)
    )
    if reduction == "none":
        return losses_N
    return losses_N.sum() / max(1, int((sizes_N > 1).sum()))


def _log_softmax_by_query(values_N: Tensor, query_N: Tensor, queries: int) -> Tensor:
    """Returns the logarithm of the softmax over the rows of each query."""
    max_Q = values_N.new_full((queries,), -torch.inf)
    max_Q = max_Q.scatter_reduce(0, query_N, values_N.detach(), "amax")
    shifted_N = values_N - max_Q[query_N]
    sums_Q = values_N.new_zeros(queries).index_add(0, query_N, shifted_N.exp())
    log_softmax_N: Tensor = shifted_N - sums_Q.log()[query_N]
    return log_softmax_N


def yield_pairs(query_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields all ordered pairs of rows that belong to the same query, in chunks.

    A chunk has about ``_MAX_PAIRS`` pairs: the indices [P] of the first rows and the indices [P] of
    the second rows. Each row is also paired with itself.
    """
    order = query_N.argsort(stable=True)
    sizes_Q = torch.unique_consecutive(query_N[order], return_counts=True)[1]
    size_N, end_N = (
        values_Q.repeat_interleave(sizes_Q) for values_Q in (sizes_Q, sizes_Q.cumsum(0))
    )
    step = max(1, _MAX_PAIRS // int(sizes_Q.max()) if len(order) else 1)
    chunks = (torch.split(values_N, step) for values_N in (size_N, end_N, order))
    for size_R, end_R, order_R in zip(*chunks, strict=True):
        row_P = torch.arange(len(order_R), device=order.device).repeat_interleave(size_R)
        # The pairs of a row begin with the first row of its query.
        begin_R = size_R.cumsum(0) - size_R
        offset_P = torch.arange(len(row_P), device=order.device) - begin_R[row_P]
        yield order_R[row_P], order[(end_R - size_R)[row_P] + offset_P]


_LOSSES: dict[str, _Reducible] = {
    "mae": F.l1_loss,
    "poisson": partial(F.poisson_nll_loss, log_input=True),
    "ranknet": _ranknet,
    "listnet": _listnet,
}
