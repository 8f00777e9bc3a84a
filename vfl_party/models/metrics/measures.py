"""Computes the metrics of a task.

The first evaluation imports torchmetrics, so that a passive party never pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.task import LOWER_IS_BETTER, METRICS, TaskSettings, top_of
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import PlugIns, where_it_failed
from vfl_party.base.statistics import (
    FIRST,
    ScoreRanking,
    auc,
    c_index_spread,
    log_losses,
    ndcg,
)
from vfl_party.models.metrics.losses import loss_fn, scores
from vfl_party.models.metrics.threshold import decide

_WHERE = "recipe: task.metrics"


@dataclass(frozen=True)
class Metric:
    """The type that an entry point of ``vfl.metrics`` names.

    Args:
        compute: (scores, targets) -> the metric over all rows of a split; None if it is undefined
            for them. Both are float64 on the CPU, except for a class, int64. ``binary``:
            probabilities [N, 1], 0 and 1 [N, 1]. ``multiclass``: probabilities [N, classes],
            classes [N]. ``multilabel``: probabilities [N, labels], 0 and 1 [N, labels].
            ``regression``: values [N, 1], values [N, 1], in the label's unit. ``survival``:
            logarithms of hazards [N, 1], times and events [N, 2]. ``ranking``: scores [N, 1],
            relevances and numbers of queries [N, 2].
        lower_is_better: for early stopping.
    """

    compute: Callable[[Tensor, Tensor], float | None]
    lower_is_better: bool = False


PLUGINS = PlugIns("vfl.metrics", "metric", ours=tuple(METRICS))


def load_metric(name: str) -> Metric:
    """Returns the metric of a plug-in; a bare function is a metric of which more is better. Raises
    InputError if it is unknown.
    """
    loaded = PLUGINS.load(name, _WHERE)
    made = Metric(loaded) if callable(loaded) and not isinstance(loaded, type) else loaded
    return PLUGINS.check_type(made, name, _WHERE, Metric)


def first_metric(task: TaskSettings) -> str:
    """Returns the metric by which a task is judged, if nothing names another one."""
    return FIRST[task.kind]


def lower_is_better(task: TaskSettings, name: str) -> bool:
    """Returns whether a smaller value of one of the task's metrics is better. Raises InputError."""
    return (
        load_metric(name).lower_is_better
        if name in task.plugin_metrics
        else name in LOWER_IS_BETTER
    )


def evaluate(
    task: TaskSettings,
    outputs_NO: Tensor,
    targets: Tensor,
    unscale: Callable[[Tensor], Tensor] | None = None,
    *,
    weights_N: Tensor | None = None,
    threshold: float | None = None,
) -> dict[str, float]:
    """Computes metrics over all rows (``task.all_metrics``) in float64 on the CPU; empty if there
    are no rows.

    Every metric but ``loss`` counts each row once.

    Args:
        task: decides the metrics. All: ``loss``, the mean of what training minimises. ``binary``:
            ``accuracy`` and ``f1`` at the threshold, ``auc``. ``multiclass``: ``accuracy``, ``f1``
            (macro, over the classes that occur in targets or predictions), ``auc`` (macro, one
            class against the rest, over the classes that occur in the targets). ``multilabel``: the
            means of what ``binary`` has, over the labels for which it is defined. ``regression``:
            ``rmse`` in the label's own unit, ``rmse_scaled`` in the scale that the model sees.
            ``survival``: ``c_index``. ``ranking``: ``ndcg``.
        outputs_NO: as for ``loss_fn``, on any device.
        targets: as for ``loss_fn``.
        unscale: from the model's scale to the label's unit; None if they are the same.
        weights_N: what each row counts in ``loss``; None: all count 1.
        threshold: the probability above which a row is positive; None: 0.5. Only for ``binary``.

    A metric is left out if it is undefined: ``auc`` and its kin if the targets hold a single class,
    ``c_index`` if no two rows can be compared, ``ndcg`` if no query of two rows has a relevant one,
    ``r2`` if the targets hold a single value, ``mape`` if one of them is 0. Raises InputError if a
    plug-in's metric cannot be computed.
    """
    if not len(targets):
        return {}
    outputs_NO = outputs_NO.detach().cpu().double()
    targets = targets.detach().cpu().to(torch.int64 if task.kind == "multiclass" else torch.float64)
    if weights_N is not None:
        weights_N = weights_N.detach().cpu().double()
    metrics = {"loss": loss_fn(task)(outputs_NO, targets, weights_N).item()}
    if task.kind == "regression":
        metrics |= _regression(task, scores(task, outputs_NO), targets, unscale)
    elif task.kind == "survival":
        metrics |= _survival(outputs_NO.squeeze(1), *targets.unbind(dim=1))
    elif task.kind == "ranking":
        metrics |= _ranking(task, outputs_NO.squeeze(1), *targets.unbind(dim=1))
    elif task.kind == "binary":
        metrics |= _binary(task, outputs_NO.squeeze(1), targets.squeeze(1).long(), threshold)
    elif task.kind == "multilabel":
        metrics |= _multilabel(task, outputs_NO, targets.long())
    else:
        metrics |= _multiclass(task, outputs_NO.log_softmax(dim=1), targets)
    return metrics | (_others(task, outputs_NO, targets, unscale) if task.plugin_metrics else {})


def _others(
    task: TaskSettings,
    outputs_NO: Tensor,
    targets: Tensor,
    unscale: Callable[[Tensor], Tensor] | None,
) -> dict[str, float]:
    """Computes the metrics of plug-ins."""
    scores_NO = scores(task, outputs_NO)
    if task.kind == "regression" and unscale is not None:
        scores_NO, targets = unscale(scores_NO), unscale(targets)
    metrics = {}
    for name in task.plugin_metrics:
        metric = load_metric(name)
        try:
            value = metric.compute(scores_NO.clone(), targets.clone())
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{_WHERE}: the metric {name!r} failed {where_it_failed(error)}. Correct the "
                "plug-in, or remove it.",
            ) from error
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            # No number, or a tensor of several.
            number = math.nan
        if not math.isfinite(number):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{_WHERE}: the metric {name!r} must return a finite number or None (got "
                f"{str(value)[:40]}). Correct the plug-in, or remove it.",
            )
        metrics[name] = number
    return metrics


def _binary(
    task: TaskSettings, logits_N: Tensor, targets_N: Tensor, threshold: float | None
) -> dict[str, float]:
    m, guess_N = functional().classification, decide(logits_N, threshold).long()
    both = bool(targets_N.min() != targets_N.max())
    metrics = {
        "accuracy": m.binary_accuracy(guess_N, targets_N, validate_args=False).item(),
        "f1": m.binary_f1_score(guess_N, targets_N, validate_args=False).item(),
    }
    if both:
        metrics["auc"] = auc(logits_N.numpy(), targets_N.numpy() == 1)
    wanted: dict[str, Callable[[], float]] = {
        "precision": lambda: m.binary_precision(guess_N, targets_N, validate_args=False).item(),
        "recall": lambda: m.binary_recall(guess_N, targets_N, validate_args=False).item(),
        "brier": lambda: (
            functional().mean_squared_error(logits_N.sigmoid(), targets_N.double()).item()
        ),
        "log_loss": lambda: _log_loss((logits_N * (2 * targets_N - 1)).sigmoid()),
    }
    if both:
        wanted |= {
            "gini": lambda: 2 * metrics["auc"] - 1,
            "ks": lambda: _precision_and_ks(logits_N, targets_N)[1],
            "average_precision": lambda: _precision_and_ks(logits_N, targets_N)[0],
        }
    return metrics | _compute_requested(task, wanted)


def _multilabel(task: TaskSettings, logits_NL: Tensor, targets_NL: Tensor) -> dict[str, float]:
    by_label = [
        _binary(task, logits_N.contiguous(), targets_N.contiguous(), None)
        for logits_N, targets_N in zip(logits_NL.T, targets_NL.T, strict=True)
    ]
    metrics: dict[str, list[float]] = {}
    for of_label in by_label:
        for name, value in of_label.items():
            metrics.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in metrics.items()}


def _multiclass(task: TaskSettings, scores_NC: Tensor, targets_N: Tensor) -> dict[str, float]:
    m, n = functional().classification, scores_NC.shape[1]

    def of(measure: Callable[..., Tensor], **how: object) -> float:
        return measure(scores_NC, targets_N, n, validate_args=False, **how).item()

    metrics = {
        "accuracy": of(m.multiclass_accuracy, average="micro"),
        "f1": of(m.multiclass_f1_score, average="macro"),
    }
    classes = sorted(set(targets_N.tolist()))
    if len(classes) > 1:
        aucs = [auc(scores_NC[:, k].numpy(), targets_N.numpy() == k) for k in classes]
        metrics["auc"] = sum(aucs) / len(aucs)
    wanted: dict[str, Callable[[], float]] = {
        "precision": lambda: of(m.multiclass_precision, average="macro"),
        "recall": lambda: of(m.multiclass_recall, average="macro"),
        "log_loss": lambda: _log_loss(scores_NC.exp().gather(1, targets_N[:, None])),
        # The sum over the classes, as Brier has it.
        "brier": lambda: (
            (scores_NC.exp() - F.one_hot(targets_N, n)).square().sum(dim=1).mean().item()
        ),
    }
    for name in task.own_metrics:
        k = top_of(name)
        if k is not None:
            metrics[name] = of(m.multiclass_accuracy, average="micro", top_k=min(k, n))
    return metrics | _compute_requested(task, wanted)


def _compute_requested(
    task: TaskSettings, known: dict[str, Callable[[], float]]
) -> dict[str, float]:
    """Computes those of ``known`` that the recipe names."""
    return {name: known[name]() for name in task.own_metrics if name in known}


def _precision_and_ks(scores_N: Tensor, targets_N: Tensor) -> tuple[float, float]:
    ranking = ScoreRanking(targets_N.numpy(), scores_N.numpy())
    return ranking.average_precision_and_ks(np.ones(len(targets_N)))


def _log_loss(probabilities: Tensor) -> float:
    """Returns the log loss. ``probabilities``: that of the true class of each row."""
    return float(log_losses(probabilities.numpy()).mean())


def _survival(hazards_N: Tensor, times_N: Tensor, events_N: Tensor) -> dict[str, float]:
    """Harrell's C: of the pairs of rows of which one is known to be the first, the share in which
    it has the greater hazard; equal hazards count half.
    """
    spread = c_index_spread(times_N.numpy(), events_N.numpy(), hazards_N.numpy())
    return {} if spread is None else {"c_index": spread.value}


def _ranking(
    task: TaskSettings, scores_N: Tensor, relevance_N: Tensor, query_N: Tensor
) -> dict[str, float]:
    """NDCG (Järvelin and Kekäläinen 2002), whose gain is the relevance; equal scores share their
    places. A mean over the queries of two rows or more of which one is relevant.
    """
    names: dict[str, int | None] = {"ndcg": None}
    names |= {name: k for name in task.own_metrics if (k := top_of(name)) is not None}
    order = query_N.argsort(stable=True)
    sizes = torch.unique_consecutive(query_N[order], return_counts=True)[1].tolist()
    queries = [
        (relevance_N[rows].numpy(), scores_N[rows].numpy())
        for rows in torch.split(order, sizes)
        if len(rows) > 1 and bool((relevance_N[rows] > 0).any())
    ]
    return {
        name: sum(ndcg(*query, k) for query in queries) / len(queries)
        for name, k in names.items()
        if queries
    }


def _regression(
    task: TaskSettings,
    values_N1: Tensor,
    targets_N1: Tensor,
    unscale: Callable[[Tensor], Tensor] | None,
) -> dict[str, float]:
    m, scaled = functional(), (values_N1.flatten(), targets_N1.flatten())
    own = tuple(map(unscale, scaled)) if unscale is not None else scaled
    metrics = {
        "rmse": m.mean_squared_error(*own, squared=False).item(),
        "rmse_scaled": m.mean_squared_error(*scaled, squared=False).item(),
    }
    wanted: dict[str, Callable[[], float]] = {"mae": lambda: m.mean_absolute_error(*own).item()}
    if own[1].min() != own[1].max():
        # Centred on the mean: a sum of squares of large labels would round the variance away.
        centred = own[1] - own[1].mean()
        wanted["r2"] = lambda: (
            1 - (own[0] - own[1]).square().sum() / centred.square().sum()
        ).item()
    if bool((own[1] != 0).all()):
        wanted["mape"] = lambda: m.mean_absolute_percentage_error(*own).item()
    return metrics | _compute_requested(task, wanted)


@cache
def functional() -> Any:
    """Returns ``torchmetrics.functional``, imported on first use."""
    with _not_installed("torchvision", "matplotlib"):
        import torchmetrics.functional

    return torchmetrics.functional


@contextmanager
def _not_installed(*packages: str) -> Iterator[None]:
    """Makes torchmetrics treat ``packages`` as missing inside the block.

    Any import of torchmetrics loads torchvision and matplotlib if installed, for image metrics and
    plots: 2.5 s and 266 MB a process, instead of 0.7 s and 75 MB. It asks RequirementCache, a class
    of its dependency, whether they are installed. If a later version asks in another way, the
    import only becomes slow again.
    """
    from lightning_utilities.core.imports import RequirementCache

    is_available = RequirementCache.__bool__
    RequirementCache.__bool__ = lambda self: self.requirement not in packages and is_available(self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RequirementCache.__bool__ = is_available  # type: ignore[method-assign]
