"""Computes loss, predictions and metrics of a task.

The first evaluation imports torchmetrics, so that a passive party never pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import TaskSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_party.base.plugins import PlugIns, where_it_failed

Loss = Callable[[Tensor, Tensor], Tensor]
_WHERE = "recipe: task.metrics"


@dataclass(frozen=True)
class Metric:
    """The type that an entry point of ``vfl.metrics`` names.

    Args:
        compute: (scores, targets) -> the metric over all rows of a split; None if it is undefined
            for them. Both are float64 on the CPU, except for a class, int64. ``binary``:
            probabilities [N, 1], 0 and 1 [N, 1]. ``multiclass``: probabilities [N, classes],
            classes [N]. ``regression``: values [N, 1], values [N, 1], in the label's unit.
        lower_is_better: for early stopping.
    """

    compute: Callable[[Tensor, Tensor], float | None]
    lower_is_better: bool = False


PLUGINS = PlugIns("vfl.metrics", "metric")


def load_metric(name: str) -> Metric:
    """Returns the metric of a plug-in. Raises InputError if there is none."""
    return PLUGINS.checked(PLUGINS.load(name, _WHERE), name, _WHERE, Metric)


def lower_is_better(task: TaskSettings, name: str) -> bool:
    """Returns whether a smaller value of one of the task's metrics is better. Raises InputError."""
    return (
        load_metric(name).lower_is_better
        if name in task.metrics
        else name in ("loss", "rmse", "rmse_scaled")
    )


def loss_fn(task: TaskSettings) -> Loss:
    """Returns the task's loss function ``loss(outputs_NO, targets)``: the mean over a batch, a
    scalar.

    ``binary``: logits [N, 1], targets float [N, 1] of 0 and 1. ``multiclass``: logits [N, classes],
    targets int64 [N]. ``regression``: values [N, 1], targets float [N, 1], both scaled.
    """
    if task.kind == "binary":
        return F.binary_cross_entropy_with_logits
    return F.cross_entropy if task.kind == "multiclass" else F.mse_loss


def scores(task: TaskSettings, outputs_NO: Tensor) -> Tensor:
    """Returns predictions of the same shape: probabilities from logits, or the (scaled) values of a
    regression.
    """
    if task.kind == "binary":
        return outputs_NO.sigmoid()
    return outputs_NO.softmax(dim=1) if task.kind == "multiclass" else outputs_NO


def evaluate(
    task: TaskSettings,
    outputs_NO: Tensor,
    targets: Tensor,
    unscale: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, float]:
    """Computes metrics over all rows (``task.all_metrics``) in float64 on the CPU; empty if there
    are no rows.

    Args:
        task: decides the metrics. All: ``loss``, the mean. ``binary``: ``accuracy`` and ``f1`` at
            probability 0.5, ``auc``. ``multiclass``: ``accuracy``, ``f1`` (macro, over the classes
            that occur in targets or predictions), ``auc`` (macro, one class against the rest, over
            the classes that occur in the targets). ``regression``: ``rmse`` in the label's own
            unit, ``rmse_scaled`` in the scale that the model sees.
        outputs_NO: as for ``loss_fn``, on any device.
        targets: as for ``loss_fn``.
        unscale: from the model's scale to the label's unit; None if they are the same.

    ``auc`` is left out if the targets hold a single class: it is undefined then. Raises InputError
    if a plug-in's metric cannot be computed.
    """
    if not len(targets):
        return {}
    outputs_NO = outputs_NO.detach().cpu().double()
    targets = targets.detach().cpu().to(torch.int64 if task.kind == "multiclass" else torch.float64)
    found = {"loss": loss_fn(task)(outputs_NO, targets).item()}
    if task.kind == "regression":
        found |= _regression(outputs_NO, targets, unscale)
    elif task.kind == "binary":
        found |= _binary(outputs_NO.squeeze(1), targets.squeeze(1).long())
    else:
        found |= _multiclass(outputs_NO.log_softmax(dim=1), targets)
    return found | (_others(task, outputs_NO, targets, unscale) if task.metrics else {})


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
    found = {}
    for name in task.metrics:
        metric = load_metric(name)
        try:
            value = metric.compute(scores_NO.clone(), targets.clone())
        except VflError:
            raise
        except Exception as error:
            text = f"{_WHERE}: the metric {name!r} failed {where_it_failed(error)}"
            raise InputError(
                Code.CONFIG_INVALID, f"{text}; correct the plug-in, or remove it"
            ) from error
        if value is None:
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            # No number, or a tensor of several.
            number = math.nan
        if not math.isfinite(number):
            text = (
                f"{_WHERE}: the metric {name!r} gives {str(value)[:40]}, and a finite number, "
                "or None, is wanted"
            )
            raise InputError(Code.CONFIG_INVALID, f"{text}; correct the plug-in, or remove it")
        found[name] = number
    return found


def _binary(logits_N: Tensor, targets_N: Tensor) -> dict[str, float]:
    m = functional().classification
    metrics = {
        "accuracy": m.binary_accuracy((logits_N > 0).long(), targets_N, validate_args=False).item(),
        "f1": m.binary_f1_score((logits_N > 0).long(), targets_N, validate_args=False).item(),
    }
    if targets_N.min() != targets_N.max():
        metrics["auc"] = _auc(logits_N, targets_N)
    return metrics


def _multiclass(scores_NC: Tensor, targets_N: Tensor) -> dict[str, float]:
    m, n = functional().classification, scores_NC.shape[1]
    metrics = {
        "accuracy": m.multiclass_accuracy(
            scores_NC, targets_N, n, average="micro", validate_args=False
        ).item(),
        "f1": m.multiclass_f1_score(
            scores_NC, targets_N, n, average="macro", validate_args=False
        ).item(),
    }
    classes = sorted(set(targets_N.tolist()))
    # Class by class: multiclass_auroc warns of every class that does not occur.
    if len(classes) > 1:
        aucs = [_auc(scores_NC[:, k], (targets_N == k).long()) for k in classes]
        metrics["auc"] = sum(aucs) / len(aucs)
    return metrics


def _auc(scores_N: Tensor, targets_N: Tensor) -> float:
    # Ranks, equal for ties: torchmetrics applies a sigmoid to values outside [0, 1], which makes
    # large logits equal.
    scores_N = scores_N.contiguous()
    ranks_N = torch.searchsorted(scores_N.sort().values, scores_N)
    auc = functional().classification.binary_auroc(
        ranks_N.double() / len(ranks_N), targets_N, validate_args=False
    )
    value: float = auc.item()
    return value


def _regression(
    values_N1: Tensor, targets_N1: Tensor, unscale: Callable[[Tensor], Tensor] | None
) -> dict[str, float]:
    def rmse(a_N1: Tensor, b_N1: Tensor) -> float:
        value: float = (
            functional().mean_squared_error(a_N1.flatten(), b_N1.flatten(), squared=False).item()
        )
        return value

    scaled = rmse(values_N1, targets_N1)
    return {
        "rmse": rmse(unscale(values_N1), unscale(targets_N1)) if unscale else scaled,
        "rmse_scaled": scaled,
    }


@cache
def functional() -> Any:
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

    found = RequirementCache.__bool__
    RequirementCache.__bool__ = lambda self: self.requirement not in packages and found(self)  # type: ignore[method-assign]
    try:
        yield
    finally:
        RequirementCache.__bool__ = found  # type: ignore[method-assign]
