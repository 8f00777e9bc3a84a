"""Losses, metrics and decision thresholds of a task."""

from vfl_party.models.metrics.losses import TaskLoss, loss_fn, scores
from vfl_party.models.metrics.measures import (
    PLUGINS,
    Metric,
    evaluate,
    first_metric,
    functional,
    load_metric,
    lower_is_better,
)
from vfl_party.models.metrics.plugin_loss import LossOfRows
from vfl_party.models.metrics.threshold import choose_threshold, choose_threshold_of_scores, decide

__all__ = [
    "PLUGINS",
    "LossOfRows",
    "Metric",
    "TaskLoss",
    "choose_threshold",
    "choose_threshold_of_scores",
    "decide",
    "evaluate",
    "first_metric",
    "functional",
    "load_metric",
    "loss_fn",
    "lower_is_better",
    "scores",
]
