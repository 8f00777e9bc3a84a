"""Selects and compares the metric that early stopping monitors."""

from __future__ import annotations

from collections.abc import Mapping

from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.metrics import lower_is_better
from vfl_party.models.training import EarlyStopping
from vfl_party.phases.context import Party


def check_stopping(party: Party, phase: str, rule: EarlyStopping) -> None:
    """Raises InputError if the task lacks the rule's metric, or if there are no validation rows."""
    task = party.recipe.task
    if rule.metric not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: early_stopping.metric: a {task.kind} task has no "
            f"{rule.metric}. Choose one of {', '.join(task.all_metrics)}, or add it to "
            "task.metrics.",
        )
    if len(party.rows.get("validation")) == 0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"phases: {phase}: early_stopping needs validation rows (got 0). Set rows.validation, "
            "or data.split.",
        )


def get_monitored_value(phase: str, rule: EarlyStopping, metrics: Mapping[str, float]) -> float:
    """Returns the value of the rule's metric. ``metrics``: The metrics of the validation rows.
    Raises InputError if the metric is missing.
    """
    value = metrics.get(rule.metric)
    if value is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"phases: {phase}: early_stopping.metric: this task has no {rule.metric}. Choose one "
            f"of {', '.join(metrics)}.",
        )
    return value


def is_better(task: TaskSettings, rule: EarlyStopping, value: float, best: float) -> bool:
    """Returns whether ``value`` of the rule's metric is better than the best so far."""
    return value < best if lower_is_better(task, rule.metric) else value > best
