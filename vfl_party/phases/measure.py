"""The metrics that a phase reports, with the threshold that the recipe's rule chooses."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vfl_common.config.task import ThresholdRule
from vfl_party.base.seeds import Rows
from vfl_party.models.metrics import choose_threshold, evaluate
from vfl_party.phases.check_task import check_chooses
from vfl_party.phases.context import Party

# The rows by which a rule chooses.
CHOOSES = "validation"


def compute_metrics(
    party: Party, outputs: Mapping[str, tuple[Rows, Tensor]], trained: Rows | None = None
) -> dict[str, dict[str, float]]:
    """Returns the metrics of rows, {name: {metric: value}}; at the active party.

    If ``outputs`` has validation rows, a rule of ``task.threshold`` chooses by them first, and the
    party keeps the threshold for what it measures and predicts from then on.

    Args:
        party: which has the labels.
        outputs: {name, such as a split's: (rows, the top model's outputs for them)}; those without
            rows are left out.
        trained: the rows over which weights in the loss have the mean 1; None: the training rows.

    Raises InputError if there are no rows by which a rule could have chosen.
    """
    task, (labels, targets) = party.recipe.task, party.need_labels()
    held = {name: part for name, part in outputs.items() if len(part[0])}
    if isinstance(task.threshold, ThresholdRule) and CHOOSES in held:
        rows, outputs_NO = held[CHOOSES]
        party.scores.threshold = choose_threshold(
            task.threshold, outputs_NO, party.take(targets, rows)
        )
    threshold = decides(party)
    if threshold is None and held:
        # Parties without common rows reach this without having been checked.
        check_chooses(task, 0)
    weights = party.row_weights(party.rows("train") if trained is None else trained)
    more = {"threshold": threshold} if threshold is not None else {}
    return {
        name: evaluate(
            task,
            labels.select_known(outputs_NO),
            party.take(targets, rows),
            labels.unscale,
            weights_N=None if weights is None else party.take(weights, rows),
            threshold=threshold,
        )
        | more
        for name, (rows, outputs_NO) in held.items()
    }


def decides(party: Party) -> float | None:
    """Returns the probability above which a row is decided positive; None: 0.5, or not chosen
    yet.
    """
    threshold = party.recipe.task.threshold
    return party.scores.threshold if isinstance(threshold, ThresholdRule) else threshold
