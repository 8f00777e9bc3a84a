"""Computes the metrics that a phase reports, with the threshold that the recipe's rule chooses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vfl_common.config.task import ThresholdRule
from vfl_party.base.seeds import Rows
from vfl_party.models.metrics import choose_threshold, evaluate
from vfl_party.phases.check_task import check_chooses
from vfl_party.phases.context import Party

# The split with which a rule chooses the threshold.
CHOOSES = "validation"


def compute_metrics(
    party: Party, outputs: Mapping[str, tuple[Rows, Tensor]], trained: Rows | None = None
) -> dict[str, dict[str, float]]:
    """Returns the metrics of rows, {name: {metric: value}}. Only the active party can call this.

    If ``outputs`` has validation rows, a rule of ``task.threshold`` first chooses the threshold
    with them. The party uses this threshold for all later metrics and predictions.

    Args:
        party: The active party, which has the labels.
        outputs: {name, such as a split's: (rows, the top model's outputs [N, O] for these rows)}.
            Entries without rows are left out.
        trained: The rows over which the weights in the loss have mean 1. None for the training
            rows.

    Raises InputError if a rule chooses the threshold and there were no validation rows.
    """
    task, (labels, targets) = party.recipe.task, party.rows.need_labels()
    nonempty = {
        name: rows_and_outputs
        for name, rows_and_outputs in outputs.items()
        if len(rows_and_outputs[0])
    }
    if isinstance(task.threshold, ThresholdRule) and CHOOSES in nonempty:
        rows, outputs_NO = nonempty[CHOOSES]
        party.scores.threshold = choose_threshold(
            task.threshold, outputs_NO, party.rows.take(targets, rows)
        )
    threshold = get_threshold(party)
    if threshold is None and nonempty:
        # Recipes without common rows are not checked earlier.
        check_chooses(task, 0)
    weights = party.rows.compute_weights(party.rows.get("train") if trained is None else trained)
    threshold_metric = {"threshold": threshold} if threshold is not None else {}
    return {
        name: evaluate(
            task,
            labels.select_known(outputs_NO),
            party.rows.take(targets, rows),
            labels.unscale,
            weights_N=None if weights is None else party.rows.take(weights, rows),
            threshold=threshold,
        )
        | threshold_metric
        for name, (rows, outputs_NO) in nonempty.items()
    }


def get_threshold(party: Party) -> float | None:
    """Returns the probability above which a row is predicted positive. None if it is the default
    0.5, or if it has not been chosen yet.
    """
    threshold = party.recipe.task.threshold
    return party.scores.threshold if isinstance(threshold, ThresholdRule) else threshold
