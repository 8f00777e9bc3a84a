"""Computes the metrics of a task, and chooses the decision threshold.

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
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.task import LOWER_IS_BETTER, METRICS, TaskSettings, ThresholdRule, parse_k
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import PlugIns, describe_failure
from vfl_party.base.statistics import (
    MAIN_METRICS,
    ScoreRanking,
    auc,
    compute_c_index,
    compute_log_losses,
    ndcg,
)
from vfl_party.models.losses import loss_fn, scores

_WHERE = "recipe: task.metrics"
PLUGINS = PlugIns("vfl.metrics", "metric", ours=tuple(METRICS))
# The threshold if the recipe sets none.
USUAL_THRESHOLD = 0.5
# The smallest and the largest threshold. Both have a finite logit.
_MIN, _MAX = math.ulp(0.0), 1.0 - 2.0**-53


@dataclass(frozen=True)
class Metric:
    """The type that an entry point of ``vfl.metrics`` names.

    Args:
        compute: A function (scores, targets) -> the metric over all rows of a split, or None if the
            metric is undefined for these rows. Scores and targets are float64 on the CPU, except
            that classes are int64. ``binary``: probabilities [N, 1] and targets of 0 and 1 [N, 1].
            ``multiclass``: probabilities [N, classes] and classes [N]. ``multilabel``:
            probabilities [N, labels] and targets of 0 and 1 [N, labels]. ``regression``: predicted
            and true values [N, 1] in the label's unit. ``survival``: logarithms of hazards [N, 1],
            and times and events [N, 2]. ``ranking``: scores [N, 1], and relevances and numbers of
            queries [N, 2].
        lower_is_better: Whether early stopping looks for the minimum of this metric.
    """

    compute: Callable[[Tensor, Tensor], float | None]
    lower_is_better: bool = False


def load_metric(name: str) -> Metric:
    """Loads a plug-in's metric. A higher value is better for a metric that is a bare function.

    Raises InputError if no installed plug-in has this metric.
    """
    loaded = PLUGINS.load(name, _WHERE)
    metric = Metric(loaded) if callable(loaded) and not isinstance(loaded, type) else loaded
    return PLUGINS.check_type(metric, name, _WHERE, Metric)


def first_metric(task: TaskSettings) -> str:
    """Returns the default metric for judging models of a task."""
    return MAIN_METRICS[task.kind]


def lower_is_better(task: TaskSettings, name: str) -> bool:
    """Returns whether a lower value of the metric ``name`` is better.

    Raises InputError if no installed plug-in has this metric.
    """
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
    """Computes a task's metrics (``task.all_metrics``) over all rows, in float64 on the CPU.

    Only ``loss`` uses the weights; every other metric counts each row once. The result is empty if
    there are no rows.

    Args:
        task: The task, whose kind determines the metrics. All kinds: ``loss``, the mean training
            loss. ``binary``: ``accuracy`` and ``f1`` at the threshold, and ``auc``. ``multiclass``:
            ``accuracy``; ``f1`` (macro, over the classes that occur in targets or predictions);
            ``auc`` (macro, one-vs-rest, over the classes that occur in the targets).
            ``multilabel``: the metrics of ``binary``, each averaged over the labels for which it is
            defined. ``regression``: ``rmse`` in the label's unit and ``rmse_scaled`` in the model's
            scale. ``survival``: ``c_index``. ``ranking``: ``ndcg``.
        outputs_NO: The model's outputs, in the shape that ``loss_fn`` describes, on any device.
        targets: The targets, in the shape that ``loss_fn`` describes.
        unscale: Converts values from the model's scale to the label's unit. None if they are the
            same.
        weights_N: The weight of each row in ``loss``. Default: 1 for each row.
        threshold: The probability above which a ``binary`` row is positive. Default: 0.5.

    An undefined metric is left out: ``auc`` and metrics like it if the targets have only one class,
    ``c_index`` if no two rows can be compared, ``ndcg`` if no query of two or more rows has a
    relevant row, ``r2`` if all targets are the same, and ``mape`` if a target is 0. Raises
    InputError if a plug-in's metric fails.
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
    return metrics | (
        _compute_plugin_metrics(task, outputs_NO, targets, unscale) if task.plugin_metrics else {}
    )


def _compute_plugin_metrics(
    task: TaskSettings,
    outputs_NO: Tensor,
    targets: Tensor,
    unscale: Callable[[Tensor], Tensor] | None,
) -> dict[str, float]:
    """Computes the metrics that plug-ins provide."""
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
                f"{_WHERE}: the metric {name!r} failed {describe_failure(error)}. Correct the "
                "plug-in, or remove it.",
            ) from error
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            # The plug-in returned something that is not one number.
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
    classification, decided_N = functional().classification, decide(logits_N, threshold).long()
    has_both_classes = bool(targets_N.min() != targets_N.max())
    metrics = {
        "accuracy": classification.binary_accuracy(
            decided_N, targets_N, validate_args=False
        ).item(),
        "f1": classification.binary_f1_score(decided_N, targets_N, validate_args=False).item(),
    }
    if has_both_classes:
        metrics["auc"] = auc(logits_N.numpy(), targets_N.numpy() == 1)
    optional_metrics: dict[str, Callable[[], float]] = {
        "precision": lambda: classification.binary_precision(
            decided_N, targets_N, validate_args=False
        ).item(),
        "recall": lambda: classification.binary_recall(
            decided_N, targets_N, validate_args=False
        ).item(),
        "brier": lambda: (
            functional().mean_squared_error(logits_N.sigmoid(), targets_N.double()).item()
        ),
        "log_loss": lambda: _log_loss((logits_N * (2 * targets_N - 1)).sigmoid()),
    }
    if has_both_classes:
        optional_metrics |= {
            "gini": lambda: 2 * metrics["auc"] - 1,
            "ks": lambda: _precision_and_ks(logits_N, targets_N)[1],
            "average_precision": lambda: _precision_and_ks(logits_N, targets_N)[0],
        }
    return metrics | _compute_requested(task, optional_metrics)


def _multilabel(task: TaskSettings, logits_NL: Tensor, targets_NL: Tensor) -> dict[str, float]:
    by_label = [
        _binary(task, logits_N.contiguous(), targets_N.contiguous(), None)
        for logits_N, targets_N in zip(logits_NL.T, targets_NL.T, strict=True)
    ]
    metrics: dict[str, list[float]] = {}
    for label_metrics in by_label:
        for name, value in label_metrics.items():
            metrics.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in metrics.items()}


def _multiclass(task: TaskSettings, scores_NC: Tensor, targets_N: Tensor) -> dict[str, float]:
    classification, n = functional().classification, scores_NC.shape[1]

    def compute(measure: Callable[..., Tensor], **how: object) -> float:
        return measure(scores_NC, targets_N, n, validate_args=False, **how).item()

    metrics = {
        "accuracy": compute(classification.multiclass_accuracy, average="micro"),
        "f1": compute(classification.multiclass_f1_score, average="macro"),
    }
    classes = sorted(set(targets_N.tolist()))
    if len(classes) > 1:
        aucs = [auc(scores_NC[:, k].numpy(), targets_N.numpy() == k) for k in classes]
        metrics["auc"] = sum(aucs) / len(aucs)
    optional_metrics: dict[str, Callable[[], float]] = {
        "precision": lambda: compute(classification.multiclass_precision, average="macro"),
        "recall": lambda: compute(classification.multiclass_recall, average="macro"),
        "log_loss": lambda: _log_loss(scores_NC.exp().gather(1, targets_N[:, None])),
        # Brier's definition sums over the classes.
        "brier": lambda: (
            (scores_NC.exp() - F.one_hot(targets_N, n)).square().sum(dim=1).mean().item()
        ),
    }
    for name in task.own_metrics:
        k = parse_k(name)
        if k is not None:
            metrics[name] = compute(
                classification.multiclass_accuracy, average="micro", top_k=min(k, n)
            )
    return metrics | _compute_requested(task, optional_metrics)


def _compute_requested(
    task: TaskSettings, optional_metrics: dict[str, Callable[[], float]]
) -> dict[str, float]:
    """Computes the optional metrics that the recipe names."""
    return {name: optional_metrics[name]() for name in task.own_metrics if name in optional_metrics}


def _precision_and_ks(scores_N: Tensor, targets_N: Tensor) -> tuple[float, float]:
    ranking = ScoreRanking(targets_N.numpy(), scores_N.numpy())
    return ranking.average_precision_and_ks(np.ones(len(targets_N)))


def _log_loss(probabilities: Tensor) -> float:
    """Returns the mean log loss of ``probabilities``, the probability of each row's true class."""
    return float(compute_log_losses(probabilities.numpy()).mean())


def _survival(hazards_N: Tensor, times_N: Tensor, events_N: Tensor) -> dict[str, float]:
    """Computes Harrell's C over the pairs of rows of which one is known to have its event first.

    It is the share of pairs in which that row has the greater hazard. Equal hazards count half.
    """
    spread = compute_c_index(times_N.numpy(), events_N.numpy(), hazards_N.numpy())
    return {} if spread is None else {"c_index": spread.value}


def _ranking(
    task: TaskSettings, scores_N: Tensor, relevance_N: Tensor, query_N: Tensor
) -> dict[str, float]:
    """Computes NDCG (Järvelin and Kekäläinen 2002) with the relevance as gain.

    It is a mean over the queries that have two or more rows, at least one of them relevant. Rows
    with equal scores share their ranks.
    """
    names: dict[str, int | None] = {"ndcg": None}
    names |= {name: k for name in task.own_metrics if (k := parse_k(name)) is not None}
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
    torchmetrics, scaled = functional(), (values_N1.flatten(), targets_N1.flatten())
    unscaled = tuple(map(unscale, scaled)) if unscale is not None else scaled
    metrics = {
        "rmse": torchmetrics.mean_squared_error(*unscaled, squared=False).item(),
        "rmse_scaled": torchmetrics.mean_squared_error(*scaled, squared=False).item(),
    }
    optional_metrics: dict[str, Callable[[], float]] = {
        "mae": lambda: torchmetrics.mean_absolute_error(*unscaled).item()
    }
    if unscaled[1].min() != unscaled[1].max():
        # The targets are centred, because a sum of squares of large values loses precision.
        centred = unscaled[1] - unscaled[1].mean()
        optional_metrics["r2"] = lambda: (
            1 - (unscaled[0] - unscaled[1]).square().sum() / centred.square().sum()
        ).item()
    if bool((unscaled[1] != 0).all()):
        optional_metrics["mape"] = lambda: torchmetrics.mean_absolute_percentage_error(
            *unscaled
        ).item()
    return metrics | _compute_requested(task, optional_metrics)


@cache
def functional() -> Any:
    """Returns ``torchmetrics.functional``, imported on first use."""
    with _hide_packages("torchvision", "matplotlib", "scipy"):
        import torchmetrics.functional

    return torchmetrics.functional


@contextmanager
def _hide_packages(*packages: str) -> Iterator[None]:
    """Makes torchmetrics treat ``packages`` as missing inside the block.

    Any import of torchmetrics loads torchvision and matplotlib if installed, for image metrics and
    plots, and scipy.signal, which it only changes: 4 s and 260 MB a process, instead of 0.1 s and
    7 MB. It asks two objects of its dependency whether they are installed. If a later version asks
    in another way, the import only becomes slow again.
    """
    from lightning_utilities.core import imports

    is_available, is_installed = imports.RequirementCache.__bool__, imports.package_available
    imports.RequirementCache.__bool__ = lambda self: (  # type: ignore[method-assign]
        self.requirement not in packages and is_available(self)
    )
    imports.package_available = lambda name: name not in packages and is_installed(name)  # type: ignore[assignment]
    try:
        yield
    finally:
        imports.RequirementCache.__bool__ = is_available  # type: ignore[method-assign]
        imports.package_available = is_installed


def decide(outputs_N1: Tensor, threshold: float | None) -> Tensor:
    """Decides which rows are positive.

    Args:
        outputs_N1: The logits of the rows.
        threshold: A probability. None means 0.5.

    Returns a bool tensor in the shape of the logits.
    """
    if threshold is None or threshold == USUAL_THRESHOLD:
        return outputs_N1 > 0
    # This compares logits, because the probabilities of large logits all round to 1.
    return outputs_N1.double() > math.log(threshold) - math.log1p(-threshold)


def choose_threshold(rule: ThresholdRule, outputs_N1: Tensor, targets_N1: Tensor) -> float:
    """Chooses the best threshold for the logits and labels of rows.

    The threshold is half-way between two neighbouring probabilities. If several thresholds are
    equally good, it is the highest. Logits above 36.7 have the probability 1 in float64, so a
    threshold cannot separate them.

    Args:
        rule: The recipe's criterion for the best threshold.
        outputs_N1: The logits of the rows.
        targets_N1: The labels of the rows, 0 or 1.
    """
    p_N, order = outputs_N1.detach().cpu().double().sigmoid().flatten().sort(descending=True)
    y_N = targets_N1.detach().cpu().double().flatten()[order]
    # With cut k the first k rows are positive. A cut between equal probabilities is not possible.
    hits_K = torch.cat([y_N.new_zeros(1), y_N.cumsum(0)])
    positive_K = torch.arange(len(p_N) + 1, dtype=torch.float64)
    misses_K, false_K = hits_K[-1] - hits_K, positive_K - hits_K
    if rule.rule == "f1":
        # If no label is positive, F1 is 0 for every cut.
        value_K = 2 * hits_K / (positive_K + hits_K[-1]).clamp_min(1.0)
    elif rule.rule == "rate":
        value_K = -(positive_K / max(1, len(p_N)) - (rule.rate or 0.0)).abs()
    else:
        value_K = -(
            false_K * (rule.false_positive or 0.0) + misses_K * (rule.false_negative or 0.0)
        )
    ends_K = torch.cat([p_N.new_ones(1), p_N, p_N.new_zeros(1)])
    value_K = value_K.masked_fill(ends_K[:-1] == ends_K[1:], -torch.inf)
    cut = int(value_K.argmax())
    return min(max(float((ends_K[cut] + ends_K[cut + 1]) / 2), _MIN), _MAX)


def choose_threshold_of_scores(
    rule: ThresholdRule, scores_N: npt.NDArray[np.float64], truth_N: npt.NDArray[np.int64]
) -> float:
    """Chooses the best threshold as ``choose_threshold`` does, but from probabilities."""
    return choose_threshold(
        rule, torch.from_numpy(scores_N.copy()).logit(), torch.from_numpy(truth_N.copy())
    )
